//! Counts of drafted and accepted tokens by the reference's rules, so that accepted lengths are
//! comparable.

use serde::{Deserialize, Serialize};

use crate::{Completion, Cycle};

/// Counts over verification cycles. Ratios are computed from the counts and never stored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptanceStats {
    /// Finished sequences.
    pub samples: u64,
    /// Verification cycles.
    pub cycles: u64,
    /// Tokens that cycles committed: the accepted drafts plus one bonus token. There is no bonus
    /// token if an accepted stop token ended the sequence.
    pub committed: u64,
    /// Drafted tokens that were verified. Trees count with their depths.
    pub proposed: u64,
    /// Nodes of trees that were verified; 0 if blocks were.
    #[serde(default, skip_serializing_if = "crate::is_zero")]
    pub nodes: u64,
    /// Drafted tokens that were accepted.
    pub accepted: u64,
    /// Generated tokens after truncation to the limit.
    pub output_tokens: u64,
    /// Cycles whose block was longer than k, for each position k.
    pub proposed_at: Vec<u64>,
    /// Cycles that accepted more than k tokens.
    pub accepted_at: Vec<u64>,
    /// Cycles whose block was longer than k and that accepted at least k tokens.
    pub reached_at: Vec<u64>,
}

impl AcceptanceStats {
    /// Empty counts for blocks of up to `block_size` tokens.
    pub fn new(block_size: usize) -> Self {
        let zeros = vec![0; block_size];
        Self { proposed_at: zeros.clone(), accepted_at: zeros.clone(), reached_at: zeros, ..Self::default() }
    }

    /// Adds one finished sequence.
    pub fn add(&mut self, completion: &Completion) {
        self.samples += 1;
        self.output_tokens += completion.tokens.len() as u64;
        for cycle in &completion.cycles {
            self.add_cycle(cycle);
        }
    }

    /// Adds a cycle of a sequence, which may be unfinished.
    pub fn add_cycle(&mut self, cycle: &Cycle) {
        let (proposed, accepted) = (cycle.proposed as usize, cycle.accepted as usize);
        self.cycles += 1;
        self.committed += u64::from(cycle.committed);
        self.proposed += u64::from(cycle.proposed);
        self.nodes += u64::from(cycle.nodes);
        self.accepted += u64::from(cycle.accepted);
        self.grow_positions(proposed);
        for k in 0..proposed {
            self.proposed_at[k] += 1;
            self.reached_at[k] += u64::from(accepted >= k);
            self.accepted_at[k] += u64::from(accepted > k);
        }
    }

    /// Extends the counts to `block_size` positions.
    fn grow_positions(&mut self, block_size: usize) {
        let size = self.proposed_at.len().max(block_size);
        for counts in [&mut self.proposed_at, &mut self.accepted_at, &mut self.reached_at] {
            counts.resize(size, 0);
        }
    }

    /// Adds all counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.grow_positions(other.proposed_at.len());
        self.samples += other.samples;
        self.cycles += other.cycles;
        self.committed += other.committed;
        self.proposed += other.proposed;
        self.nodes += other.nodes;
        self.accepted += other.accepted;
        self.output_tokens += other.output_tokens;
        let pairs = [
            (&mut self.proposed_at, &other.proposed_at),
            (&mut self.accepted_at, &other.accepted_at),
            (&mut self.reached_at, &other.reached_at),
        ];
        for (mine, theirs) in pairs {
            for (a, b) in mine.iter_mut().zip(theirs) {
                *a += b;
            }
        }
    }

    /// τ: tokens committed per cycle, including the bonus token. None without cycles.
    pub fn accepted_length(&self) -> Option<f64> {
        ratio(self.committed, self.cycles)
    }

    /// Drafted tokens that the target ran: nodes of trees, or tokens of blocks.
    pub fn verified(&self) -> u64 {
        if self.nodes > 0 { self.nodes } else { self.proposed }
    }

    /// Committed tokens per token that the target had to verify (drafts plus one anchor per cycle).
    pub fn verify_rate(&self) -> Option<f64> {
        ratio(self.committed, self.verified() + self.cycles)
    }

    /// Fraction of verified draft tokens that were thrown away.
    pub fn rejected_fraction(&self) -> Option<f64> {
        ratio(self.verified() - self.accepted, self.verified())
    }

    /// Fraction of blocks longer than k that accepted position k (0-based), over all such blocks.
    pub fn acceptance_rates(&self) -> Vec<Option<f64>> {
        self.accepted_at.iter().zip(&self.proposed_at).map(|(&n, &d)| ratio(n, d)).collect()
    }

    /// Like [`AcceptanceStats::acceptance_rates`], but only over blocks that accepted all earlier positions.
    pub fn conditional_acceptance_rates(&self) -> Vec<Option<f64>> {
        self.accepted_at.iter().zip(&self.reached_at).map(|(&n, &d)| ratio(n, d)).collect()
    }
}

fn ratio(num: u64, den: u64) -> Option<f64> {
    (den > 0).then(|| num as f64 / den as f64)
}
