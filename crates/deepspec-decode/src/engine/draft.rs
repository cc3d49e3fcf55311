//! What the drafter proposes, and how much of it is verified.

use tch::{Kind, Tensor};

use super::{Engine, Numbers, to_host};
use crate::{DraftRequest, DraftSampling, Proposal, Proposer, Target};

impl<T: Target, P: Proposer> Engine<T, P> {
    /// Blocks for all decoding slots, and how much of each is verified; None without a drafter or anything to draft.
    pub(super) fn draft(&mut self, decoding: &[usize], numbers: &Numbers) -> Option<(Proposal, Vec<usize>)> {
        let block = self.draft_len();
        if decoding.is_empty() || block == 0 {
            return None;
        }
        let proposer = self.proposer.as_mut()?;
        let full_block = proposer.draft_len();
        let greedy = match self.options.draft_sampling {
            DraftSampling::Greedy => Some(numbers.decoding.greedy()),
            DraftSampling::Probabilistic => None,
        };
        let mut proposal = proposer.propose(&DraftRequest {
            context: &self.context,
            slots: decoding,
            anchors: &numbers.anchors,
            uniforms: &numbers.draft,
            sampling: greedy.as_ref().unwrap_or(&numbers.decoding),
        });
        for (slot, rows) in self.context.chunks.drain(..) {
            if let Some(sequence) = &mut self.slots[slot] {
                sequence.seen += rows;
            }
        }
        if block < full_block {
            proposal.tokens = proposal.tokens.narrow(1, 0, block as i64);
            proposal.probs = proposal.probs.narrow(1, 0, block as i64);
            proposal.confidence = proposal.confidence.map(|c| c.narrow(1, 0, block as i64));
        }
        let lens = match &proposal.confidence {
            // The target runs no more than this, so that the host has to know it before: one more transfer.
            Some(logits) if self.options.confidence_threshold > 0.0 => {
                kept_lengths(&self.calibrated(logits), self.options.confidence_threshold)
            }
            _ => vec![block; decoding.len()],
        };
        Some((proposal, lens))
    }

    /// Confidence logits `[S, γ]` as probabilities.
    fn calibrated(&self, logits: &Tensor) -> Tensor {
        if self.temperatures.is_empty() {
            return logits.sigmoid();
        }
        let of = |k: usize| self.temperatures.get(k).map_or(1.0, |&t| t as f32);
        let temperatures: Vec<f32> = (0..logits.size()[1] as usize).map(of).collect();
        (logits / Tensor::from_slice(&temperatures).to_device(logits.device())).sigmoid()
    }
}

/// How many tokens of each block stand before the first whose confidence is below the threshold; `confidence [S, γ]`.
pub fn kept_lengths(confidence: &Tensor, threshold: f64) -> Vec<usize> {
    let keeps = confidence.to_kind(Kind::Double).ge(threshold).to_kind(Kind::Int64);
    to_host(&keeps.cumprod(1, Kind::Int64).sum_dim_intlist(1, false, Kind::Double))
        .iter()
        .map(|&n| n as usize)
        .collect()
}
