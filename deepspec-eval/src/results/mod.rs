//! `results.json`: the counts of a run, and ratios computed from them.

mod context_lengths;
mod metrics;
#[cfg(test)]
pub mod sample;
mod served;
mod settings;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use deepspec_core::{atomic, usage};
use deepspec_datasets::suites::Domain;
use deepspec_drafters::EngineRule;
use deepspec_engine::{AcceptanceStats, DraftSampling};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::confidence::{ConfidenceResult, SweepPoint};
use crate::statistics::{Estimate, Interval, PromptCounts};
use crate::versioned;
pub use context_lengths::{AnswerCycles, ContextRange, collapse_advice, lengths_by_context};
pub use metrics::{Baseline, Metrics, Timing, mean};
pub use served::{FiguresSource, Served};
pub use settings::{DrafterIdentity, Settings, TargetIdentity, Turns};

/// File name. The file is written last, so that its presence means that all outputs are complete.
pub const RESULTS_FILE: &str = "results.json";
const FORMAT_NAME: &str = "deepspec-results";
const FORMAT_VERSION: u64 = 1;

/// Results of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Results {
    /// Always `deepspec-results`.
    pub format: String,
    /// Version of the file format.
    pub format_version: u64,
    /// Version of the program that wrote the file.
    pub tool_version: String,
    /// Settings of the run.
    pub settings: Settings,
    /// All settings that the answers depend on, including digests of models and suites. If a
    /// command is repeated with equal values, the results stay as they are.
    #[serde(default)]
    pub asked: Map<String, Value>,
    /// The target model.
    pub target: TargetIdentity,
    /// The drafter; None for plain decoding.
    pub drafter: Option<DrafterIdentity>,
    /// The engine that decoded; None for this program's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served: Option<Served>,
    /// One entry per suite.
    pub suites: Vec<SuiteResult>,
    /// Averages over the suites of each domain.
    pub domains: Vec<DomainResult>,
    /// Averages over all suites.
    pub overall: Metrics,
    /// Accepted lengths under the other rule of draft sampling; None at temperature 0, where both
    /// rules agree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_rule: Option<OtherRule>,
    /// How engines draft and verify with the drafter above temperature 0. Empty if no engine loads it. None without a
    /// drafter, for a run by a server, and in results of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_rules: Option<Vec<EngineRule>>,
    /// Reliability of the drafter's confidences, over the cycles of all suites.
    #[serde(default)]
    pub confidence: Option<ConfidenceResult>,
}

/// Results of one suite.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SuiteResult {
    /// Name of the suite.
    pub name: String,
    /// Domain of the suite.
    pub domain: Domain,
    /// Path of the suite's file, for display only.
    pub file: String,
    /// SHA-256 of the file.
    pub file_digest: String,
    /// Rows in the file.
    pub rows: usize,
    /// Ids of samples whose prompt leaves no room for an answer; they are not scored.
    pub skipped: Vec<String>,
    /// Samples that had less room than `max_new_tokens`.
    pub shortened: usize,
    /// Number of turns that were not asked, because the earlier conversation filled the context or
    /// an answer was truncated.
    #[serde(default)]
    pub unasked: usize,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Counts that all ratios are computed from.
    pub counts: AcceptanceStats,
    /// Counts of every prompt by sample, of a run by a server. Its traces may lack cycles.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub prompts: BTreeMap<String, PromptCounts>,
    /// Accepted lengths by the length of the context. Empty if all contexts are of one range, or if a server does not
    /// report every step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub context_lengths: Vec<ContextRange>,
    /// Effect of confidence thresholds; empty if the run itself cut its blocks, or without a
    /// confidence head.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sweep: Vec<SweepPoint>,
    /// Times of the run.
    pub timing: Timing,
    /// Plain decoding of the same samples in the same run.
    pub baseline: Option<Baseline>,
    /// Ratios computed from the counts and times.
    pub metrics: Metrics,
}

/// Accepted lengths of the same samples under the rule of draft sampling that the run did not use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OtherRule {
    /// The rule of draft sampling that the run did not use.
    pub draft_sampling: DraftSampling,
    /// Accepted lengths of the suites, in the order of the results.
    pub suites: Vec<RuleLength>,
    /// Mean accepted length over the suites.
    pub accepted_length: Option<f64>,
    /// 95 % bootstrap interval of the mean over prompts.
    pub accepted_length_interval: Option<Interval>,
}

/// The accepted length of one suite under a rule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RuleLength {
    /// Name of the suite.
    pub suite: String,
    /// τ: tokens committed per cycle.
    pub accepted_length: Option<f64>,
    /// 95 % bootstrap interval of the accepted length over prompts.
    pub accepted_length_interval: Option<Interval>,
}

/// Averages over the suites of a domain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DomainResult {
    /// The domain.
    pub domain: Domain,
    /// Suites of the domain.
    pub suites: Vec<String>,
    /// Mean metrics of the suites.
    pub metrics: Metrics,
}

impl Results {
    /// Builds results with their averages.
    pub fn new(
        settings: Settings,
        target: TargetIdentity,
        drafter: Option<DrafterIdentity>,
        mut scored: Vec<ScoredSuite>,
    ) -> Self {
        for one in &mut scored {
            one.suite.metrics.accepted_length_interval = one.length.interval();
        }
        let (domains, overall) = averages(&scored);
        let suites = scored.into_iter().map(|one| one.suite).collect();
        Self {
            format: FORMAT_NAME.into(),
            format_version: FORMAT_VERSION,
            tool_version: deepspec_core::VERSION.into(),
            settings,
            asked: Map::new(),
            target,
            drafter,
            served: None,
            domains,
            overall,
            suites,
            other_rule: None,
            engine_rules: None,
            confidence: None,
        }
    }

    /// Reads the results in a folder, or a results file.
    ///
    /// # Errors
    /// Usage errors: the file does not exist, or this version cannot read it as results.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let file = if path.is_dir() { path.join(RESULTS_FILE) } else { path.to_path_buf() };
        if !file.is_file() {
            usage!(
                "{} does not exist; give the --output-dir of a finished `deepspec-eval run`",
                file.display()
            );
        }
        versioned::read(
            &file,
            (FORMAT_NAME, FORMAT_VERSION),
            "not written by this version of `deepspec-eval run`",
        )
    }

    /// Writes the results into a folder atomically.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn write(&self, dir: &Path) -> anyhow::Result<()> {
        Ok(atomic::write_json(&dir.join(RESULTS_FILE), self)?)
    }

    /// The contents of the file.
    ///
    /// # Errors
    /// Fails if serialisation fails, which no results are known to cause.
    pub fn to_json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(self).context("writing JSON")? + "\n")
    }
}

/// A suite's results with its τ over resampled prompts.
pub struct ScoredSuite {
    /// Results of the suite.
    pub suite: SuiteResult,
    /// τ over resampled prompts.
    pub length: Estimate,
}

/// Averages of every domain that has suites, and over all suites.
pub fn averages(scored: &[ScoredSuite]) -> (Vec<DomainResult>, Metrics) {
    let of = |domain| scored.iter().filter(move |one| one.suite.domain == domain);
    let domains = Domain::ALL.into_iter().filter(|&domain| of(domain).next().is_some());
    let domains = domains.map(|domain| DomainResult {
        domain,
        suites: of(domain).map(|one| one.suite.name.clone()).collect(),
        metrics: average(of(domain)),
    });
    (domains.collect(), average(scored.iter()))
}

fn average<'s>(scored: impl Iterator<Item = &'s ScoredSuite> + Clone) -> Metrics {
    let length = Estimate::mean(scored.clone().map(|one| &one.length));
    Metrics {
        accepted_length_interval: length.interval(),
        ..Metrics::mean(scored.map(|one| &one.suite.metrics))
    }
}

#[cfg(test)]
mod tests {
    use deepspec_testkit::mutate::Fuzzer;

    use super::sample::{results, suite};
    use super::*;

    #[test]
    fn suites_weigh_the_same_whatever_their_size() {
        // τ is 3 over one cycle and 1.5 over two; chat has no cycle.
        let suites = [
            suite("a", Domain::Math, &[2]),
            suite("b", Domain::Math, &[1, 0]),
            suite("c", Domain::Chat, &[]),
        ];
        let (found, overall) = averages(&suites);
        assert_eq!(found.iter().map(|d| d.domain).collect::<Vec<_>>(), [Domain::Math, Domain::Chat]);
        assert_eq!(found[0].suites, ["a", "b"]);
        assert_eq!(found[0].metrics.accepted_length, Some(2.25));
        assert_eq!(found[0].metrics.rates, [Some(0.75), Some(0.5)]);
        assert_eq!(found[0].metrics.conditional_rates, [Some(0.75), Some(0.5)]);
        assert_eq!(found[0].metrics.verify_rate, Some((1.0 + 0.5) / 2.0));
        assert_eq!(found[1].metrics.accepted_length, None);
        assert_eq!(overall.accepted_length_interval, Some(Interval { low: 2.25, high: 2.25 }));
        assert_eq!(overall.accepted_length, Some(2.25));
        assert_eq!((overall.tokens_per_s, overall.speed_up), (Some(4.0), Some(2.0)));
        assert_eq!(Metrics::mean([].iter()), Metrics::default());
    }

    #[test]
    fn results_of_earlier_versions_are_read() {
        let dir = tempfile::tempdir().unwrap();
        results().write(dir.path()).unwrap();
        let read = Results::read(dir.path()).unwrap();
        assert_eq!(read.settings.seed_list(), "seed 1", "it had one seed, and no list of them");
        assert_eq!(serde_json::to_value(&read).unwrap(), serde_json::to_value(results()).unwrap());
    }

    #[test]
    fn damaged_results_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let mut dice = Fuzzer::new(5, &["suites", "metrics", "deepspec-results", "counts", "math", "first"]);
        let (sound, mut refused) = (serde_json::to_value(results()).unwrap(), 0);
        for _ in 0..1000 {
            std::fs::write(dir.path().join(RESULTS_FILE), dice.line(sound.clone())).unwrap();
            if let Err(error) = Results::read(dir.path()) {
                let told = error.to_string();
                assert!(told.contains(RESULTS_FILE), "{told}");
                refused += 1;
            }
        }
        assert!(refused > 400, "only {refused} were noticed");
    }
}
