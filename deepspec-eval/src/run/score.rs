//! Computes the results of suites from answers.

use std::collections::BTreeMap;

use deepspec_datasets::suites::TokenizedSuite;
use deepspec_engine::AcceptanceStats;

use super::decode::{Answer, SuitePass};
use crate::confidence::{self, ConfidenceResult};
use crate::results::{
    AnswerCycles, Baseline, ContextRange, Metrics, OtherRule, RuleLength, ScoredSuite, Settings, SuiteResult,
    lengths_by_context,
};
use crate::statistics::{Estimate, PromptCounts};

/// Scores the suites; `plain` has the answers of plain decoding for the same samples.
pub fn score_suites(
    suites: &[TokenizedSuite],
    drafted: &[SuitePass],
    plain: Option<&[SuitePass]>,
    block_size: usize,
    settings: &Settings,
) -> Vec<ScoredSuite> {
    let plain = plain.into_iter().flatten().map(Some).chain(std::iter::repeat(None));
    let passes = suites.iter().zip(drafted).zip(plain);
    passes.map(|((suite, pass), plain)| score_suite(suite, pass, plain, block_size, settings)).collect()
}

/// Accepted lengths under the other rule of draft sampling.
pub fn score_other_rule(suites: &[TokenizedSuite], passes: &[SuitePass], settings: &Settings) -> OtherRule {
    let lengths: Vec<Estimate> =
        suites.iter().zip(passes).map(|(suite, pass)| accepted_length_estimate(suite, pass)).collect();
    let named = suites.iter().zip(passes).zip(&lengths).map(|((suite, pass), length)| RuleLength {
        suite: suite.rows.suite.name.to_string(),
        accepted_length: count_acceptance(&pass.answers, 0).accepted_length(),
        accepted_length_interval: length.interval(),
    });
    let suites: Vec<RuleLength> = named.collect();
    OtherRule {
        draft_sampling: settings.draft_sampling.other(),
        accepted_length: crate::results::mean(suites.iter().filter_map(|suite| suite.accepted_length)),
        accepted_length_interval: Estimate::mean(lengths.iter()).interval(),
        suites,
    }
}

/// A suite's τ, over resampled prompts.
fn accepted_length_estimate(suite: &TokenizedSuite, pass: &SuitePass) -> Estimate {
    let mut prompts = BTreeMap::<&str, PromptCounts>::new();
    for answer in &pass.answers {
        let prompt = prompts.entry(&suite.ids[answer.sample]).or_default();
        prompt.cycles += answer.completion.cycles.len() as u64;
        prompt.committed += answer.completion.cycles.iter().map(|c| u64::from(c.committed)).sum::<u64>();
    }
    Estimate::accepted_length(&suite.rows.suite.name.to_string(), prompts)
}

/// A suite's accepted lengths by the length of the context.
pub fn context_lengths(suite: &TokenizedSuite, pass: &SuitePass) -> Vec<ContextRange> {
    let answers = pass.answers.iter().map(|answer| AnswerCycles {
        sample: &suite.ids[answer.sample],
        prompt_tokens: answer.prompt_tokens,
        cycles: &answer.completion.cycles,
    });
    lengths_by_context(&suite.rows.suite.name, answers)
}

fn score_suite(
    suite: &TokenizedSuite,
    pass: &SuitePass,
    plain: Option<&SuitePass>,
    block_size: usize,
    settings: &Settings,
) -> ScoredSuite {
    let counts = count_acceptance(&pass.answers, block_size);
    let baseline =
        plain.map(|plain| Baseline::new(count_acceptance(&plain.answers, 0).output_tokens, plain.timing));
    let length = accepted_length_estimate(suite, pass);
    let sweep = if settings.policy().cuts_by_confidence() {
        vec![]
    } else {
        let cycles = pass.answers.iter().flat_map(|answer| &answer.completion.cycles);
        // `score_confidence` reports invalid confidences of all suites.
        confidence::threshold_sweep(cycles, block_size, settings.calibration.as_deref()).unwrap_or_default()
    };
    let context_lengths = context_lengths(suite, pass);
    let suite = SuiteResult { sweep, context_lengths, ..suite_result(suite, pass, counts, baseline) };
    ScoredSuite { suite, length }
}

/// Results of a suite with these counts, without a sweep or counts of its prompts.
pub fn suite_result(
    suite: &TokenizedSuite,
    pass: &SuitePass,
    counts: AcceptanceStats,
    baseline: Option<Baseline>,
) -> SuiteResult {
    SuiteResult {
        name: suite.rows.suite.name.to_string(),
        domain: suite.rows.suite.domain,
        file: suite.rows.path.display().to_string(),
        file_digest: suite.rows.digest.clone(),
        rows: suite.rows.total,
        skipped: suite.skipped.clone(),
        shortened: suite.shortened,
        unasked: pass.unasked,
        prompt_tokens: pass.answers.iter().map(|answer| answer.prompt_tokens as u64).sum(),
        metrics: Metrics::new(&counts, &pass.timing, baseline.as_ref()),
        counts,
        prompts: BTreeMap::new(),
        context_lengths: vec![],
        sweep: vec![],
        timing: pass.timing,
        baseline,
    }
}

fn count_acceptance(answers: &[Answer], block_size: usize) -> AcceptanceStats {
    let mut counts = AcceptanceStats::new(block_size);
    answers.iter().for_each(|answer| counts.add(&answer.completion));
    counts
}

/// Reliability of the confidences of all cycles. None, with a warning, if they are invalid.
pub fn score_confidence(
    passes: &[SuitePass],
    block_size: usize,
    settings: &Settings,
) -> Option<ConfidenceResult> {
    let answers = passes.iter().flat_map(|pass| &pass.answers);
    let cycles = answers.flat_map(|answer| &answer.completion.cycles);
    let cut = settings.policy().cuts_by_confidence();
    confidence::measure_confidence(cycles, block_size, settings.calibration.as_deref(), cut).unwrap_or_else(
        |problem| {
            tracing::warn!("the confidences are not judged: {problem}");
            None
        },
    )
}
