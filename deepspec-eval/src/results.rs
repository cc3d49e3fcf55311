//! `results.json`: what was measured, as counts first; ratios are computed from them.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use deepspec_core::suite::Domain;
use deepspec_core::{atomic, usage};
use deepspec_decode::{StepTimes, Tally};
use serde::{Deserialize, Serialize};

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
}

/// How a run was made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Decides every draw, and which rows of a capped suite are scored.
    pub seed: u64,
    /// Divides the logits.
    pub temperature: f64,
    /// Limit of generated tokens per sample.
    pub max_new_tokens: usize,
    /// Samples per suite at most.
    pub limit: Option<usize>,
    /// Which turns of a sample are answered.
    pub turns: Turns,
    /// The chat template's `enable_thinking`.
    pub thinking: bool,
    /// System message before every prompt.
    pub system_prompt: Option<String>,
    /// Blocks are cut before the first token of lower confidence.
    pub confidence_threshold: Option<f64>,
    /// Blocks are cut to this length.
    pub max_draft_tokens: Option<usize>,
    /// Samples decoded at once.
    pub slots: usize,
    /// Where the models ran.
    pub device: String,
    /// Kind of their weights.
    pub dtype: String,
    /// Threads that libtorch used on the CPU.
    pub threads: i32,
}

/// Which turns of a sample are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Turns {
    /// The first user message alone.
    First,
}

/// What makes two targets the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetIdentity {
    /// Its folder, for people.
    pub path: String,
    /// Digest of its architecture.
    pub config_digest: String,
    /// Digest of probes of its weights.
    pub weights_digest: String,
    /// SHA-256 of its tokenizer.json.
    pub tokenizer_digest: String,
    /// Digest of what its chat template writes.
    pub template_digest: String,
    /// Tokens that end an answer.
    pub stop_ids: Vec<i64>,
}

/// Which drafter it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrafterIdentity {
    /// Its folder, for people.
    pub path: String,
    /// Digest of its architecture.
    pub config_digest: String,
    /// Digest of probes of its weights.
    pub weights_digest: String,
    /// Drafted tokens per block.
    pub block_size: usize,
    /// Target layers whose states it reads.
    pub taps: Vec<i64>,
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
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// The counts everything else is computed from.
    pub counts: Tally,
    /// Where the time of the run went.
    pub timing: Timing,
    /// Plain decoding of the same samples in the same run.
    pub baseline: Option<Baseline>,
    /// Ratios of the above.
    pub metrics: Metrics,
}

/// Seconds of wall clock.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// From the first prompt to the last token.
    pub wall_s: f64,
    /// Drafting.
    pub draft_s: f64,
    /// The target's forwards, verification and the wait for its results.
    pub verify_s: f64,
    /// Bookkeeping on the host.
    pub host_s: f64,
    /// Forwards of the target.
    pub steps: u64,
}

impl Timing {
    /// `wall` and what the engine's clocks counted meanwhile.
    pub fn between(before: StepTimes, after: StepTimes, wall: Duration) -> Self {
        Self {
            wall_s: wall.as_secs_f64(),
            draft_s: (after.draft - before.draft).as_secs_f64(),
            verify_s: (after.verify - before.verify).as_secs_f64(),
            host_s: (after.host - before.host).as_secs_f64(),
            steps: after.steps - before.steps,
        }
    }

    fn per_second(&self, tokens: u64) -> Option<f64> {
        (self.wall_s > 0.0).then(|| tokens as f64 / self.wall_s)
    }
}

/// Plain decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// Generated tokens.
    pub output_tokens: u64,
    /// Where its time went.
    pub timing: Timing,
    /// `output_tokens` per second.
    pub tokens_per_s: Option<f64>,
}

impl Baseline {
    /// So many tokens in this time.
    pub fn new(output_tokens: u64, timing: Timing) -> Self {
        Self { output_tokens, timing, tokens_per_s: timing.per_second(output_tokens) }
    }
}

/// Ratios of a suite, or their averages over suites. Absent where there is nothing to divide.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Metrics {
    /// τ: tokens committed per cycle.
    pub accepted_length: Option<f64>,
    /// Committed tokens per token that the target verified.
    pub verify_rate: Option<f64>,
    /// Fraction of verified draft tokens that were thrown away.
    pub wasted_verify: Option<f64>,
    /// Fraction of blocks that accepted position k, whatever happened before it.
    pub rates: Vec<Option<f64>>,
    /// The same among the blocks that accepted all earlier positions.
    pub conditional_rates: Vec<Option<f64>>,
    /// Generated tokens per second.
    pub tokens_per_s: Option<f64>,
    /// `tokens_per_s` over that of plain decoding.
    pub speed_up: Option<f64>,
}

impl Metrics {
    /// The ratios of one suite.
    pub fn new(counts: &Tally, timing: &Timing, baseline: Option<&Baseline>) -> Self {
        let tokens_per_s = timing.per_second(counts.output_tokens);
        let plain = baseline.and_then(|baseline| baseline.tokens_per_s).filter(|&plain| plain > 0.0);
        Self {
            accepted_length: counts.accepted_length(),
            verify_rate: counts.verify_rate(),
            wasted_verify: counts.wasted_verify(),
            rates: counts.rates(),
            conditional_rates: counts.conditional_rates(),
            tokens_per_s,
            speed_up: tokens_per_s.zip(plain).map(|(drafted, plain)| drafted / plain),
        }
    }

    /// The mean over suites, each value over the suites that have it.
    pub fn mean<'m>(suites: impl Iterator<Item = &'m Self> + Clone) -> Self {
        let over = |value: &dyn Fn(&Self) -> Option<f64>| mean(suites.clone().filter_map(value));
        let positions = suites.clone().map(|suite| suite.rates.len()).max().unwrap_or(0);
        let at = |rates: &Vec<Option<f64>>, k: usize| rates.get(k).copied().flatten();
        Self {
            accepted_length: over(&|suite| suite.accepted_length),
            verify_rate: over(&|suite| suite.verify_rate),
            wasted_verify: over(&|suite| suite.wasted_verify),
            rates: (0..positions).map(|k| over(&|suite| at(&suite.rates, k))).collect(),
            conditional_rates: (0..positions)
                .map(|k| over(&|suite| at(&suite.conditional_rates, k)))
                .collect(),
            tokens_per_s: over(&|suite| suite.tokens_per_s),
            speed_up: over(&|suite| suite.speed_up),
        }
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
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
        suites: Vec<SuiteResult>,
    ) -> Self {
        Self {
            format: FORMAT.into(),
            format_version: VERSION,
            tool_version: env!("CARGO_PKG_VERSION").into(),
            settings,
            target,
            drafter,
            domains: domains(&suites),
            overall: Metrics::mean(suites.iter().map(|suite| &suite.metrics)),
            suites,
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
        let json: serde_json::Value = match serde_json::from_str(&atomic::read_text(&file)?) {
            Ok(json) => json,
            Err(error) => usage!("{}: not valid JSON: {error}", file.display()),
        };
        if json["format"] != FORMAT || json["format_version"] != VERSION {
            usage!(
                "{}: not written by this version of `deepspec-eval run`; expected {FORMAT} {VERSION}",
                file.display()
            );
        }
        match serde_json::from_value(json) {
            Ok(results) => Ok(results),
            Err(error) => usage!("{}: {error}", file.display()),
        }
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

/// The averages of every domain that has suites.
pub fn domains(suites: &[SuiteResult]) -> Vec<DomainResult> {
    let of = |domain| suites.iter().filter(move |suite| suite.domain == domain);
    Domain::ALL
        .into_iter()
        .filter(|&domain| of(domain).next().is_some())
        .map(|domain| DomainResult {
            domain,
            suites: of(domain).map(|suite| suite.name.clone()).collect(),
            metrics: Metrics::mean(of(domain).map(|suite| &suite.metrics)),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use deepspec_decode::{Completion, Cycle, Finish};

    use super::*;

    const TIMING: Timing = Timing { wall_s: 2.0, draft_s: 0.5, verify_s: 1.0, host_s: 0.5, steps: 9 };

    fn suite(name: &str, domain: Domain, accepted: &[u32]) -> SuiteResult {
        let cycle =
            |&accepted: &u32| Cycle { proposed: 2, accepted, committed: accepted + 1, confidence: vec![] };
        let cycles: Vec<Cycle> = accepted.iter().map(cycle).collect();
        let mut counts = Tally::new(2);
        counts.add(&Completion { id: "0".into(), tokens: vec![0; 8], finish: Finish::Stop, cycles });
        let baseline = Some(Baseline::new(4, TIMING));
        SuiteResult {
            name: name.into(),
            domain,
            file: String::new(),
            file_digest: String::new(),
            rows: 1,
            skipped: vec![],
            shortened: 0,
            prompt_tokens: 1,
            metrics: Metrics::new(&counts, &TIMING, baseline.as_ref()),
            counts,
            timing: TIMING,
            baseline,
        }
    }

    #[test]
    fn suites_weigh_the_same_whatever_their_size() {
        // τ: 3 over one cycle, 1.5 over two; chat has no cycle at all.
        let suites = [
            suite("a", Domain::Math, &[2]),
            suite("b", Domain::Math, &[1, 0]),
            suite("c", Domain::Chat, &[]),
        ];
        let found = domains(&suites);
        assert_eq!(found.iter().map(|d| d.domain).collect::<Vec<_>>(), [Domain::Math, Domain::Chat]);
        assert_eq!(found[0].suites, ["a", "b"]);
        assert_eq!(found[0].metrics.accepted_length, Some(2.25));
        assert_eq!(found[0].metrics.rates, [Some(0.75), Some(0.5)]);
        assert_eq!(found[0].metrics.conditional_rates, [Some(0.75), Some(0.5)]);
        assert_eq!(found[0].metrics.verify_rate, Some((1.0 + 0.5) / 2.0));
        assert_eq!(found[1].metrics.accepted_length, None);
        let overall = Metrics::mean(suites.iter().map(|suite| &suite.metrics));
        assert_eq!(overall.accepted_length, Some(2.25));
        assert_eq!((overall.tokens_per_s, overall.speed_up), (Some(4.0), Some(2.0)));
        assert_eq!(Metrics::mean([].iter()), Metrics::default());
    }
}
