//! Computes the results of suites from answers of a server.

use std::collections::BTreeMap;

use deepspec_datasets::suites::TokenizedSuite;
use deepspec_engine::AcceptanceStats;

use super::figures::{AcceptanceCounts, ReportedCycles};
use crate::results::{Baseline, ScoredSuite, SuiteResult};
use crate::run::decode::{Answer, SuitePass};
use crate::run::score::{context_lengths, suite_result};
use crate::statistics::{Estimate, PromptCounts};

/// Counts of answers, of which some may be reported together.
#[derive(Default)]
pub struct Tally {
    /// Counts of the reported answers.
    pub stats: AcceptanceStats,
    /// Committed tokens of answers whose cycles are not reported yet.
    waiting: u64,
}

impl Tally {
    /// Adds an answer.
    pub fn add(&mut self, answer: &Answer) {
        let Some(served) = &answer.served else { return };
        let committed = served.committed();
        self.stats.samples += 1;
        self.stats.output_tokens += served.tokens;
        match &served.cycles {
            ReportedCycles::Steps(_) => {
                answer.completion.cycles.iter().for_each(|cycle| self.stats.add_cycle(cycle));
            }
            ReportedCycles::Totals(totals) => totals.add_to(&mut self.stats, committed),
            ReportedCycles::Suite(totals) => {
                totals.add_to(&mut self.stats, committed + std::mem::take(&mut self.waiting));
            }
            ReportedCycles::Unreported => self.waiting += committed,
        }
    }

    /// The counts of all answers of a suite. The report of a whole suite may stand at any of them.
    fn of_suite(answers: &[Answer]) -> Self {
        let is_whole = |answer: &&Answer| {
            matches!(answer.served.as_ref().map(|served| &served.cycles), Some(ReportedCycles::Suite(_)))
        };
        let (whole, single): (Vec<&Answer>, Vec<&Answer>) = answers.iter().partition(is_whole);
        let mut tally = Self::default();
        single.into_iter().chain(whole).for_each(|answer| tally.add(answer));
        tally
    }
}

/// Scores the suites; `plain` has the answers of the server without a drafter.
pub fn score_suites(
    suites: &[TokenizedSuite],
    served: &[SuitePass],
    plain: Option<&[SuitePass]>,
) -> Vec<ScoredSuite> {
    let plain = plain.into_iter().flatten().map(Some).chain(std::iter::repeat(None));
    suites
        .iter()
        .zip(served)
        .zip(plain)
        .map(|((suite, pass), plain)| score_suite(suite, pass, plain))
        .collect()
}

fn score_suite(suite: &TokenizedSuite, pass: &SuitePass, plain: Option<&SuitePass>) -> ScoredSuite {
    let counts = Tally::of_suite(&pass.answers).stats;
    let tokens = |pass: &SuitePass| {
        pass.answers.iter().flat_map(|answer| &answer.served).map(|served| served.tokens).sum()
    };
    let baseline = plain.map(|plain| Baseline::new(tokens(plain), plain.timing));
    let name = suite.rows.suite.name.to_string();
    let prompts = prompt_counts(suite, pass).unwrap_or_default();
    let length = match prompts.is_empty() {
        true => Estimate::without_resamples(counts.accepted_length()),
        false => Estimate::accepted_length(&name, prompts.iter().map(|(id, counts)| (id.as_str(), *counts))),
    };
    // Only steps say where in the answer each cycle begins.
    let has_steps = |answer: &Answer| {
        answer.served.as_ref().is_some_and(|served| matches!(served.cycles, ReportedCycles::Steps(_)))
    };
    let context_lengths =
        if pass.answers.iter().all(has_steps) { context_lengths(suite, pass) } else { vec![] };
    let suite = SuiteResult { prompts, context_lengths, ..suite_result(suite, pass, counts, baseline) };
    ScoredSuite { suite, length }
}

/// Counts of every prompt; None if some are only reported together.
fn prompt_counts(suite: &TokenizedSuite, pass: &SuitePass) -> Option<BTreeMap<String, PromptCounts>> {
    let mut prompts = BTreeMap::<String, PromptCounts>::new();
    for answer in &pass.answers {
        let served = answer.served.as_ref()?;
        let cycles = match &served.cycles {
            ReportedCycles::Steps(_) => answer.completion.cycles.len() as u64,
            ReportedCycles::Totals(totals) => cycles_of_answer(totals, served.committed()),
            ReportedCycles::Suite(_) | ReportedCycles::Unreported => return None,
        };
        let prompt = prompts.entry(suite.ids[answer.sample].clone()).or_default();
        prompt.cycles += cycles;
        prompt.committed += served.committed();
    }
    Some(prompts)
}

fn cycles_of_answer(totals: &AcceptanceCounts, committed: u64) -> u64 {
    totals.cycles + totals.undrafted(committed)
}

#[cfg(test)]
mod tests {
    use deepspec_engine::{Completion, Finish};

    use super::*;
    use crate::run::server::ServedFigures;

    fn answer(tokens: u64, cycles: ReportedCycles) -> Answer {
        let completion =
            Completion { id: String::new(), tokens: vec![], finish: Finish::Stop, cycles: vec![] };
        let served = Some(ServedFigures { tokens, text: None, cycles });
        Answer { sample: 0, seed: 1, turn: 0, prompt_tokens: 3, completion, served }
    }

    #[test]
    fn counters_of_a_suite_count_the_tokens_of_all_its_answers() {
        let totals = AcceptanceCounts { cycles: 6, drafted: 42, accepted: 13, accepted_at: vec![5, 4] };
        let answers = [answer(8, ReportedCycles::Suite(totals)), answer(12, ReportedCycles::Unreported)];
        let stats = Tally::of_suite(&answers).stats;
        // (tokens − requests) ÷ cycles, with one accepted token behind an end.
        assert_eq!((stats.committed, stats.cycles, stats.output_tokens, stats.samples), (18, 6, 20, 2));
        assert_eq!(stats.accepted_length(), Some(3.0));
        assert_eq!(stats.accepted_at, [5, 4]);
    }
}
