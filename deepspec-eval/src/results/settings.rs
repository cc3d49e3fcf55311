//! Settings of a run, and identities of its models.

use std::path::Path;

use deepspec_core::usage;
use deepspec_cost::policy::Policy;
use deepspec_engine::{DraftSampling, VerifyRule};
use serde::{Deserialize, Serialize};

/// Settings of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Seed of sampling, and of the choice of rows from a capped suite.
    pub seed: u64,
    /// All seeds, `seed` first; every sample is answered once per seed. Empty in results of earlier
    /// versions.
    #[serde(default)]
    pub seeds: Vec<u64>,
    /// Sampling temperature, which divides the logits.
    pub temperature: f64,
    /// Maximum number of generated tokens per sample.
    pub max_new_tokens: usize,
    /// Maximum number of samples per suite.
    pub limit: Option<usize>,
    /// Turns of a sample that are answered.
    pub turns: Turns,
    /// `enable_thinking` of the chat template.
    pub thinking: bool,
    /// System message before every prompt.
    pub system_prompt: Option<String>,
    /// Schedule of verification. Results of earlier versions have `confidence_threshold` instead;
    /// see [`Settings::policy`].
    #[serde(default)]
    pub schedule: Policy,
    /// The threshold of a threshold schedule.
    pub confidence_threshold: Option<f64>,
    /// Cost file of a schedule that weighs costs.
    #[serde(default)]
    pub cost: Option<String>,
    /// Temperatures that divide the confidence logits, by position.
    #[serde(default)]
    pub calibration: Option<Vec<f64>>,
    /// Whether drafting ignored the Markov head.
    #[serde(default)]
    pub no_markov: bool,
    /// Maximum length of verified blocks.
    pub max_draft_tokens: Option<usize>,
    /// Rule of draft sampling; results of earlier versions used probabilistic drafting.
    #[serde(default)]
    pub draft_sampling: DraftSampling,
    /// Rule of verification. Token by token is not written, as in results of earlier versions.
    #[serde(default, skip_serializing_if = "VerifyRule::is_token")]
    pub verify: VerifyRule,
    /// Number of samples decoded at once.
    pub slots: usize,
    /// Number of engines that share the slots; 1 in results of earlier versions.
    #[serde(default = "default_lanes")]
    pub lanes: usize,
    /// Device of the models.
    pub device: String,
    /// Dtype of the weights.
    pub dtype: String,
    /// Number of CPU threads of libtorch.
    pub threads: i32,
}

fn default_lanes() -> usize {
    1
}

impl Settings {
    /// The schedule that decides how much of each block is verified.
    pub fn policy(&self) -> Policy {
        match (self.schedule, self.confidence_threshold) {
            (Policy::Whole, Some(threshold)) => Policy::Threshold(threshold),
            (schedule, _) => schedule,
        }
    }

    /// Refuses the results in `from` if they do not show how likely each drafted token is accepted.
    ///
    /// # Errors
    /// A usage error for blocks that were cut by confidence, or that were verified as a whole or as trees.
    pub fn check_observed_tokens(&self, from: &Path) -> anyhow::Result<()> {
        let policy = self.policy();
        if policy.cuts_by_confidence() {
            usage!(
                "{} is of a run with --schedule {policy}, which never saw what it cut; run it without",
                from.display()
            );
        }
        if !self.verify.is_token() {
            usage!(
                "{} is of a run with --verify {}; confidences are about tokens that are verified one by one; run it without",
                from.display(),
                self.verify
            );
        }
        Ok(())
    }

    /// The seeds as a phrase.
    pub fn seed_list(&self) -> String {
        match self.seeds.as_slice() {
            [] | [_] => format!("seed {}", self.seed),
            seeds => format!("seeds {}", seeds.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")),
        }
    }
}

/// Turns of a sample that are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Turns {
    /// The first user message alone.
    First,
    /// Every user message, after the answers that the model gave to earlier messages.
    All,
}

/// Identity of a target: targets with equal digests are the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetIdentity {
    /// Folder of the target, for display only.
    pub path: String,
    /// Hub id of the target. None if the user gave a local folder.
    #[serde(default)]
    pub hub_id: Option<String>,
    /// Digest of the architecture.
    pub config_digest: String,
    /// Digest of the weight files.
    pub weights_digest: String,
    /// SHA-256 of tokenizer.json.
    pub tokenizer_digest: String,
    /// Digest of the chat template's output.
    pub template_digest: String,
    /// Token ids that end an answer.
    pub stop_ids: Vec<i64>,
}

/// Identity of a drafter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrafterIdentity {
    /// Folder of the drafter, for display only.
    pub path: String,
    /// Hub id of the drafter. None if the user gave a local folder.
    #[serde(default)]
    pub hub_id: Option<String>,
    /// Digest of the architecture.
    pub config_digest: String,
    /// Digest of the weight files.
    pub weights_digest: String,
    /// Number of drafted tokens per block.
    pub block_size: usize,
    /// Target layers whose hidden states the drafter reads.
    pub taps: Vec<i64>,
}
