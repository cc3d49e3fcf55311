//! `results.json`: what was measured, as counts first; ratios are computed from them.

mod metrics;
#[cfg(test)]
pub mod sample;
mod settings;

use std::path::Path;

use anyhow::Context;
use deepspec_core::{atomic, usage};
use deepspec_datasets::suites::Domain;
use deepspec_engine::{DraftSampling, Tally};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::confidence::{ConfidenceResult, SweepPoint};
use crate::statistics::{Estimate, Interval};
use crate::versioned;
pub use metrics::{Baseline, Metrics, Timing, mean};
pub use settings::{DrafterIdentity, Settings, TargetIdentity, Turns};

/// Name of the file; it is written last and says that the other outputs are whole.
pub const FILE: &str = "results.json";
const FORMAT: &str = "deepspec-results";
const VERSION: u64 = 1;

/// Everything one run found.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Results {
    /// Always `deepspec-results`.
    pub format: String,
    /// Version of this layout.
    pub format_version: u64,
    /// Version of the program that wrote it.
    pub tool_version: String,
    /// How it was run.
    pub settings: Settings,
    /// What decided the answers, digests of models and suites among it: the same command again has nothing to do.
    #[serde(default)]
    pub asked: Map<String, Value>,
    /// The model that was decoded.
    pub target: TargetIdentity,
    /// The drafter; none for plain decoding.
    pub drafter: Option<DrafterIdentity>,
    /// One entry per suite.
    pub suites: Vec<SuiteResult>,
    /// Averages over the suites of each domain.
    pub domains: Vec<DomainResult>,
    /// Averages over all suites.
    pub overall: Metrics,
    /// Accepted lengths where drafted tokens are chosen by the other rule; none at temperature 0, where both are one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_rule: Option<OtherRule>,
    /// How far the drafter's confidences can be believed, over the cycles of all suites.
    #[serde(default)]
    pub confidence: Option<ConfidenceResult>,
}

/// What one suite gave.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SuiteResult {
    /// Its name.
    pub name: String,
    /// Its domain.
    pub domain: Domain,
    /// Its file, for people.
    pub file: String,
    /// SHA-256 of the file.
    pub file_digest: String,
    /// Rows in the file.
    pub rows: usize,
    /// Ids of samples whose prompt leaves no room for an answer; they are not scored.
    pub skipped: Vec<String>,
    /// Samples that had less room than `max_new_tokens`.
    pub shortened: usize,
    /// Turns that were not asked because the conversation before them had filled the target's context or had been cut short.
    #[serde(default)]
    pub unasked: usize,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// The counts everything else is computed from.
    pub counts: Tally,
    /// What thresholds on the confidence would give; empty where the run itself cut its blocks, or there is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sweep: Vec<SweepPoint>,
    /// Where the time of the run went.
    pub timing: Timing,
    /// Plain decoding of the same samples in the same run.
    pub baseline: Option<Baseline>,
    /// Ratios of the above.
    pub metrics: Metrics,
}

/// Accepted lengths of the same samples under the rule that is not the run's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OtherRule {
    /// The rule.
    pub draft_sampling: DraftSampling,
    /// The suites, in the order of the results.
    pub suites: Vec<RuleLength>,
    /// The mean over them.
    pub accepted_length: Option<f64>,
    /// Its 95 % bootstrap interval over prompts.
    pub accepted_length_interval: Option<Interval>,
}

/// The accepted length of a suite under a rule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RuleLength {
    /// The suite.
    pub suite: String,
    /// τ: tokens committed per cycle.
    pub accepted_length: Option<f64>,
    /// Its 95 % bootstrap interval over prompts.
    pub accepted_length_interval: Option<Interval>,
}

/// Averages over the suites of a domain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DomainResult {
    /// The domain.
    pub domain: Domain,
    /// Its suites.
    pub suites: Vec<String>,
    /// Their means.
    pub metrics: Metrics,
}

impl Results {
    /// Results with their averages.
    pub fn new(
        settings: Settings,
        target: TargetIdentity,
        drafter: Option<DrafterIdentity>,
        mut scored: Vec<Scored>,
    ) -> Self {
        for one in &mut scored {
            one.suite.metrics.accepted_length_interval = one.length.interval();
        }
        let (domains, overall) = averages(&scored);
        let suites = scored.into_iter().map(|one| one.suite).collect();
        Self {
            format: FORMAT.into(),
            format_version: VERSION,
            tool_version: deepspec_core::VERSION.into(),
            settings,
            asked: Map::new(),
            target,
            drafter,
            domains,
            overall,
            suites,
            other_rule: None,
            confidence: None,
        }
    }

    /// Reads the results in a folder, or a results file.
    ///
    /// # Errors
    /// Usage errors: nothing there, or not results that this version reads.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let file = if path.is_dir() { path.join(FILE) } else { path.to_path_buf() };
        if !file.is_file() {
            usage!(
                "{} does not exist; give the --output-dir of a finished `deepspec-eval run`",
                file.display()
            );
        }
        versioned::read(&file, (FORMAT, VERSION), "not written by this version of `deepspec-eval run`")
    }

    /// Writes them into a folder, whole or not at all.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn write(&self, dir: &Path) -> anyhow::Result<()> {
        Ok(atomic::write_json(&dir.join(FILE), self)?)
    }

    /// The file's text.
    ///
    /// # Errors
    /// None that could be provoked.
    pub fn to_json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(self).context("writing JSON")? + "\n")
    }
}

/// A suite's results with its τ over resampled prompts.
pub struct Scored {
    /// The results.
    pub suite: SuiteResult,
    /// The resampled τ.
    pub length: Estimate,
}

/// The averages of every domain that has suites, and those over all suites.
pub fn averages(scored: &[Scored]) -> (Vec<DomainResult>, Metrics) {
    let of = |domain| scored.iter().filter(move |one| one.suite.domain == domain);
    let domains = Domain::ALL.into_iter().filter(|&domain| of(domain).next().is_some());
    let domains = domains.map(|domain| DomainResult {
        domain,
        suites: of(domain).map(|one| one.suite.name.clone()).collect(),
        metrics: average(of(domain)),
    });
    (domains.collect(), average(scored.iter()))
}

fn average<'s>(scored: impl Iterator<Item = &'s Scored> + Clone) -> Metrics {
    let length = Estimate::mean(scored.clone().map(|one| &one.length));
    Metrics {
        accepted_length_interval: length.interval(),
        ..Metrics::mean(scored.map(|one| &one.suite.metrics))
    }
}

#[cfg(test)]
mod tests {
    use deepspec_testkit::mutate::Dice;

    use super::sample::{results, suite};
    use super::*;

    #[test]
    fn suites_weigh_the_same_whatever_their_size() {
        // τ: 3 over one cycle, 1.5 over two; chat has no cycle at all.
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
        let mut dice = Dice::new(5, &["suites", "metrics", "deepspec-results", "counts", "math", "first"]);
        let (sound, mut refused) = (serde_json::to_value(results()).unwrap(), 0);
        for _ in 0..1000 {
            std::fs::write(dir.path().join(FILE), dice.line(sound.clone())).unwrap();
            if let Err(error) = Results::read(dir.path()) {
                let told = error.to_string();
                assert!(told.contains(FILE), "{told}");
                refused += 1;
            }
        }
        assert!(refused > 400, "only {refused} were noticed");
    }
}
