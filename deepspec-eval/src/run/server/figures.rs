//! Cycles of an answer as an engine reports them, cut where the answer ends.
//!
//! Engines count accepted tokens behind a stop token. An answer of N tokens commits N − 1 of them
//! in its cycles, because the prefill computes the first one. Tokens beyond these count nowhere.

use deepspec_engine::{AcceptanceStats, Cycle, Request};
use serde::{Deserialize, Serialize};

use crate::run::entry::JournalEntry;

/// Most tokens of a block that a report may name. A larger number is a mistake, and would exhaust
/// memory.
const MAX_BLOCK: usize = 1 << 10;
/// Most blocks or tokens that a report may count, so that sums of reports cannot overflow.
const MAX_COUNT: u64 = 1 << 40;

/// An answer's figures, beside its token ids.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServedFigures {
    /// Number of generated tokens, including the stop token.
    pub tokens: u64,
    /// The answer as the engine decoded it, if the engine does not report all token ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The answer's cycles.
    pub cycles: ReportedCycles,
}

impl ServedFigures {
    /// Tokens that the cycles committed.
    pub fn committed(&self) -> u64 {
        self.tokens.saturating_sub(1)
    }
}

/// Cycles of an answer, as far as the engine reports them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReportedCycles {
    /// Every verified block in order.
    Steps(Vec<Step>),
    /// Counts of the answer.
    Totals(AcceptanceCounts),
    /// Counts of this answer and the unreported ones before it.
    Suite(AcceptanceCounts),
    /// The engine reports nothing for the answer.
    Unreported,
}

/// A verified block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Number of drafted tokens.
    pub drafted: u32,
    /// Number of accepted drafted tokens.
    pub accepted: u32,
}

/// Counts over verified blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptanceCounts {
    /// Number of blocks.
    pub cycles: u64,
    /// Number of drafted tokens; 0 if it is not reported.
    pub drafted: u64,
    /// Number of accepted drafted tokens.
    pub accepted: u64,
    /// Blocks that accepted more than k tokens, by k; empty if they are not reported.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accepted_at: Vec<u64>,
}

impl AcceptanceCounts {
    /// Counts from the number of blocks by their number of accepted tokens.
    ///
    /// # Errors
    /// A phrase, if the numbers cannot be counts of blocks.
    pub fn from_histogram(histogram: &[u64], drafted: u64) -> Result<Self, String> {
        if histogram.len() > MAX_BLOCK || histogram.iter().any(|&count| count > u64::from(u32::MAX)) {
            return Err("its histogram of accepted tokens is none of blocks".into());
        }
        let more_than = |k: usize| histogram.iter().skip(k + 1).sum();
        let accepted_at: Vec<u64> = (0..histogram.len().saturating_sub(1)).map(more_than).collect();
        let totals =
            Self { cycles: histogram.iter().sum(), drafted, accepted: accepted_at.iter().sum(), accepted_at };
        totals.checked()
    }

    /// These counts, if they can be counts of blocks.
    ///
    /// # Errors
    /// A phrase that says why not.
    pub fn checked(self) -> Result<Self, String> {
        let Self { cycles, drafted, accepted, accepted_at } = &self;
        if [cycles, drafted, accepted].into_iter().any(|count| *count > MAX_COUNT)
            || accepted_at.len() > MAX_BLOCK
        {
            return Err(format!(
                "it reports {cycles} blocks with {drafted} drafted and {accepted} accepted tokens"
            ));
        }
        if *drafted > 0 && accepted > drafted {
            return Err(format!("it reports {accepted} accepted tokens of {drafted} drafted"));
        }
        match accepted_at.iter().all(|count| count <= cycles) && accepted_at.is_sorted_by(|a, b| a >= b) {
            true => Ok(self),
            false => {
                Err(format!("it reports {accepted_at:?} accepted tokens by position of {cycles} blocks"))
            }
        }
    }

    /// Adds these counts, whose blocks committed `committed` tokens of answers.
    ///
    /// Targets also run without a draft, at the last token of an answer for instance. Tokens that
    /// no block can have committed count as one cycle each.
    pub fn add_to(&self, stats: &mut AcceptanceStats, committed: u64) {
        let undrafted = self.undrafted(committed);
        let positions = self.accepted_at.len();
        let mut own = AcceptanceStats::new(positions);
        own.cycles = self.cycles + undrafted;
        own.committed = committed;
        own.accepted = self.accepted;
        own.proposed = self.drafted.max(self.accepted);
        for (k, &count) in self.accepted_at.iter().enumerate() {
            // As the engines do, over all blocks, whatever their lengths.
            own.proposed_at[k] = self.cycles;
            own.accepted_at[k] = count;
            own.reached_at[k] = if k == 0 { self.cycles } else { self.accepted_at[k - 1] };
        }
        stats.merge(&own);
    }

    /// Number of cycles without a draft that `committed` tokens need beside the blocks.
    pub fn undrafted(&self, committed: u64) -> u64 {
        committed.saturating_sub(self.accepted + self.cycles)
    }
}

/// The cycles of an answer whose cycles committed `committed` tokens. Tokens behind the end count
/// nowhere; tokens that no block can have committed count as one cycle each.
pub fn cycles_of(steps: &[Step], committed: u64) -> Vec<Cycle> {
    let (mut cycles, mut left) = (vec![], committed);
    for step in steps {
        if left == 0 {
            break;
        }
        let whole = u64::from(step.accepted) + 1;
        // An end within the drafted tokens cuts the block there, and there is no bonus token.
        let cut = if left < whole { left as u32 } else { u32::MAX };
        let (proposed, accepted) = (step.drafted.min(cut), step.accepted.min(cut));
        let committed = whole.min(left) as u32;
        cycles.push(Cycle {
            proposed,
            nodes: 0,
            until_stop: proposed,
            accepted,
            committed,
            confidence: vec![],
        });
        left -= u64::from(committed);
    }
    let undrafted =
        Cycle { proposed: 0, nodes: 0, until_stop: 0, accepted: 0, committed: 1, confidence: vec![] };
    cycles.extend(std::iter::repeat_n(undrafted, left as usize));
    cycles
}

/// The steps, if an engine can have reported them.
///
/// # Errors
/// A phrase that names the step.
pub fn checked_steps(steps: Vec<Step>) -> Result<Vec<Step>, String> {
    let is_wrong = |step: &&Step| step.accepted > step.drafted || step.drafted as usize > MAX_BLOCK;
    match steps.iter().find(is_wrong) {
        Some(Step { drafted, accepted }) => {
            Err(format!("it reports a block of {drafted} drafted tokens with {accepted} accepted"))
        }
        None => Ok(steps),
    }
}

/// Checks that a line of a journal can be the answer to `request`. A damaged line would spoil the
/// results.
///
/// # Errors
/// A phrase that names the field and its problem.
pub fn check_entry(entry: &JournalEntry, request: &Request) -> Result<(), String> {
    let Some(served) = &entry.served else { return Err("`served` is missing".into()) };
    if entry.prompt_tokens != request.prompt.len() {
        return Err(format!("`prompt_tokens` is {}, not {}", entry.prompt_tokens, request.prompt.len()));
    }
    let (tokens, ids, most) = (served.tokens, entry.tokens.len() as u64, request.max_new_tokens as u64);
    if tokens > most || ids > tokens || entry.tokens.iter().any(|id| !(0..=i64::from(u32::MAX)).contains(id))
    {
        return Err(format!("`tokens` is {tokens} with {ids} ids, of at most {most}"));
    }
    match &served.cycles {
        ReportedCycles::Steps(steps) => drop(checked_steps(steps.clone())?),
        ReportedCycles::Totals(totals) | ReportedCycles::Suite(totals) => drop(totals.clone().checked()?),
        ReportedCycles::Unreported => {}
    }
    match entry.timing.is_plausible() {
        true => Ok(()),
        false => Err("`timing` is none that a clock shows".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(pairs: &[(u32, u32)]) -> Vec<Step> {
        pairs.iter().map(|&(drafted, accepted)| Step { drafted, accepted }).collect()
    }

    fn counted(pairs: &[(u32, u32)], committed: u64) -> Vec<(u32, u32, u32)> {
        let cycles = cycles_of(&steps(pairs), committed);
        cycles.iter().map(|cycle| (cycle.proposed, cycle.accepted, cycle.committed)).collect()
    }

    #[test]
    fn nothing_behind_the_end_of_an_answer_counts() {
        // Blocks of 3 and 5 tokens commit 8; the answer ends earlier and earlier.
        let blocks = [(7, 2), (7, 4)];
        assert_eq!(counted(&blocks, 8), [(7, 2, 3), (7, 4, 5)]);
        assert_eq!(counted(&blocks, 7), [(7, 2, 3), (4, 4, 4)], "the bonus token lies behind the end");
        assert_eq!(counted(&blocks, 5), [(7, 2, 3), (2, 2, 2)]);
        assert_eq!(counted(&blocks, 3), [(7, 2, 3)], "the second block lies behind the end");
        assert_eq!(counted(&blocks, 0), []);
    }

    #[test]
    fn tokens_without_a_draft_are_cycles() {
        assert_eq!(counted(&[(7, 2)], 5), [(7, 2, 3), (0, 0, 1), (0, 0, 1)]);
        let mut stats = AcceptanceStats::new(0);
        AcceptanceCounts { cycles: 2, drafted: 14, accepted: 3, accepted_at: vec![] }.add_to(&mut stats, 7);
        assert_eq!((stats.cycles, stats.committed, stats.proposed), (4, 7, 14));
    }

    #[test]
    fn a_histogram_gives_the_acceptance_by_position() {
        let totals = AcceptanceCounts::from_histogram(&[1, 2, 0, 3], 18).unwrap();
        assert_eq!((totals.cycles, totals.accepted, totals.accepted_at.as_slice()), (6, 11, &[5, 3, 3][..]));
        let (mut stats, mut again) = (AcceptanceStats::new(0), AcceptanceStats::new(0));
        totals.add_to(&mut stats, 17);
        let blocks = [(3, 0), (3, 1), (3, 1), (3, 3), (3, 3), (3, 3)];
        cycles_of(&steps(&blocks), 17).iter().for_each(|cycle| again.add_cycle(cycle));
        assert_eq!(stats, again);
    }

    #[test]
    fn impossible_counts_are_refused() {
        assert!(AcceptanceCounts::from_histogram(&[0, 9], 3).is_err());
        assert!(
            AcceptanceCounts { cycles: 1, accepted_at: vec![1, 2], ..AcceptanceCounts::default() }
                .checked()
                .is_err()
        );
        assert!(checked_steps(steps(&[(7, 2), (1, 3)])).unwrap_err().contains("1 drafted tokens with 3"));
    }
}
