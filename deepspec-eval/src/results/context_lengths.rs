//! Accepted length by the length of the context.

use std::collections::BTreeMap;

use deepspec_engine::Cycle;
use serde::{Deserialize, Serialize};

use crate::statistics::{Estimate, Interval, PromptCounts};
use crate::table::number;

/// Upper end of the first range of context lengths. Every further range is twice as long.
const FIRST_RANGE_TOKENS: usize = 512;
/// Cycles that a range needs for a statement about it.
const ENOUGH_CYCLES: u64 = 50;
/// Share of the drafts that are accepted at other lengths, below which acceptance has collapsed.
const COLLAPSE: f64 = 0.5;

/// Accepted length of the cycles whose contexts have `from` to `until` − 1 tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContextRange {
    /// Fewest tokens of prompt and answer before a cycle.
    pub from: usize,
    /// One more than the most tokens.
    pub until: usize,
    /// Verification cycles.
    pub cycles: u64,
    /// τ: tokens committed per cycle.
    pub accepted_length: Option<f64>,
    /// 95 % bootstrap interval of the accepted length over prompts.
    pub accepted_length_interval: Option<Interval>,
}

/// The cycles of an answer, and where they begin.
pub struct AnswerCycles<'a> {
    /// Id of the sample, for the bootstrap.
    pub sample: &'a str,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Cycles of the answer.
    pub cycles: &'a [Cycle],
}

/// Accepted lengths of a suite by the length of the context. Empty if all contexts are of one range.
pub fn lengths_by_context<'a>(
    suite: &str,
    answers: impl IntoIterator<Item = AnswerCycles<'a>>,
) -> Vec<ContextRange> {
    let mut ranges = BTreeMap::<usize, BTreeMap<&str, PromptCounts>>::new();
    for AnswerCycles { sample, prompt_tokens, cycles } in answers {
        // The prefill computes the answer's first token.
        let mut tokens = prompt_tokens + 1;
        for cycle in cycles {
            let until = range_end(tokens);
            let counts = ranges.entry(until).or_default().entry(sample).or_default();
            counts.cycles += 1;
            counts.committed += u64::from(cycle.committed);
            tokens += cycle.committed as usize;
        }
    }
    if ranges.len() < 2 {
        return vec![];
    }
    let range = |(until, prompts): (usize, BTreeMap<&str, PromptCounts>)| {
        let length =
            Estimate::accepted_length(suite, prompts.iter().map(|(&sample, &counts)| (sample, counts)));
        ContextRange {
            from: if until == FIRST_RANGE_TOKENS { 0 } else { until / 2 },
            until,
            cycles: prompts.values().map(|counts| counts.cycles).sum(),
            accepted_length: length.value,
            accepted_length_interval: length.interval(),
        }
    };
    ranges.into_iter().map(range).collect()
}

/// Upper end of the range that holds contexts of `tokens` tokens.
fn range_end(tokens: usize) -> usize {
    (tokens / FIRST_RANGE_TOKENS + 1).next_power_of_two() * FIRST_RANGE_TOKENS
}

impl ContextRange {
    /// The range in words, such as `512 to 1023`.
    pub fn name(&self) -> String {
        format!("{} to {}", self.from, self.until - 1)
    }

    /// Drafted tokens that are accepted per cycle, if enough cycles tell.
    fn accepted_drafts(&self) -> Option<f64> {
        Some(self.accepted_length? - 1.0).filter(|_| self.cycles >= ENOUGH_CYCLES)
    }
}

/// Advice if fewer than half of the drafts of a suite are accepted at long contexts, compared with shorter ones, and the
/// intervals do not overlap.
pub fn collapse_advice(suite: &str, ranges: &[ContextRange]) -> Option<String> {
    let has_collapsed = |short: &ContextRange, long: &ContextRange| {
        let falls = long.accepted_drafts()? < COLLAPSE * short.accepted_drafts()?;
        Some(falls && long.accepted_length_interval?.high < short.accepted_length_interval?.low)
    };
    let mut pairs =
        ranges.iter().enumerate().flat_map(|(i, long)| ranges[..i].iter().map(move |short| (short, long)));
    let (short, long) = pairs.find(|(short, long)| has_collapsed(short, long) == Some(true))?;
    Some(format!(
        "{suite}: acceptance falls with the context. τ is {} at {} tokens and {} at {}. If its texts are alike, longer \
         training texts (data.max_length) may help, and so may windows of block drafters (sliding_window).",
        number(long.accepted_length, 2),
        long.name(),
        number(short.accepted_length, 2),
        short.name(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cycles(committed: u32, count: usize) -> Vec<Cycle> {
        let (proposed, accepted) = (4, committed - 1);
        let cycle =
            Cycle { proposed, nodes: 0, until_stop: proposed, accepted, committed, confidence: vec![] };
        vec![cycle; count]
    }

    fn ranges(answers: &[(&str, usize, &[Cycle])]) -> Vec<ContextRange> {
        let answers = answers.iter();
        let answers =
            answers.map(|&(sample, prompt_tokens, cycles)| AnswerCycles { sample, prompt_tokens, cycles });
        lengths_by_context("suite", answers)
    }

    #[test]
    fn a_cycle_belongs_to_the_length_before_it() {
        // 508 + 1, 512 and 515 tokens stand before the three cycles.
        let found = ranges(&[("a", 508, &cycles(3, 3)), ("b", 2100, &cycles(2, 1))]);
        let counted: Vec<_> = found.iter().map(|range| (range.from, range.until, range.cycles)).collect();
        assert_eq!(counted, [(0, 512, 1), (512, 1024, 2), (2048, 4096, 1)]);
        assert_eq!(
            found.iter().map(|range| range.accepted_length).collect::<Vec<_>>(),
            [Some(3.0), Some(3.0), Some(2.0)]
        );
        assert_eq!(found[2].name(), "2048 to 4095");
        assert!(ranges(&[("a", 10, &cycles(3, 3))]).is_empty(), "one range says nothing");
    }

    #[test]
    fn advice_is_given_where_acceptance_collapses() {
        let (good, bad, fair) = (cycles(4, 60), cycles(1, 60), cycles(3, 60));
        let told = |long: &[Cycle]| {
            collapse_advice(
                "suite",
                &ranges(&[("a", 9, &good), ("b", 11, &good), ("c", 5000, long), ("d", 5000, long)]),
            )
        };
        let advice = told(&bad).unwrap();
        assert!(advice.contains("τ is 1.00 at 4096 to 8191 tokens and 4.00 at 0 to 511"), "{advice}");
        assert_eq!(told(&fair), None, "two of three drafts are accepted");
        assert_eq!(told(&bad[..20]), None, "too few cycles");
    }
}
