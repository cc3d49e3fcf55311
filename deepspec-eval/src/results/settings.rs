//! How a run was made, and with what.

use deepspec_cost::policy::Policy;
use deepspec_engine::DraftSampling;
use serde::{Deserialize, Serialize};

/// How a run was made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Decides which rows of a capped suite are scored, and draws.
    pub seed: u64,
    /// All seeds that every sample was answered with, `seed` first; results of earlier versions have `seed` alone.
    #[serde(default)]
    pub seeds: Vec<u64>,
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
    /// How much of each block is verified. Results of earlier versions say `confidence_threshold` instead; see [`Settings::policy`].
    #[serde(default)]
    pub schedule: Policy,
    /// The threshold, where that is the schedule.
    pub confidence_threshold: Option<f64>,
    /// What the schedule weighed tokens against: the file's name.
    #[serde(default)]
    pub cost: Option<String>,
    /// Temperatures that divide the confidence logits, position by position.
    #[serde(default)]
    pub calibration: Option<Vec<f64>>,
    /// Whether the Markov head was left out of drafting.
    #[serde(default)]
    pub no_markov: bool,
    /// Blocks are cut to this length.
    pub max_draft_tokens: Option<usize>,
    /// How drafted tokens were chosen; results of earlier versions drew them.
    #[serde(default)]
    pub draft_sampling: DraftSampling,
    /// Samples decoded at once.
    pub slots: usize,
    /// Engines that they were shared out among; one in results of earlier versions.
    #[serde(default = "one")]
    pub lanes: usize,
    /// Where the models ran.
    pub device: String,
    /// Kind of their weights.
    pub dtype: String,
    /// Threads that libtorch used on the CPU.
    pub threads: i32,
}

fn one() -> usize {
    1
}

impl Settings {
    /// How much of each block was verified.
    pub fn policy(&self) -> Policy {
        match (self.schedule, self.confidence_threshold) {
            (Policy::Whole, Some(threshold)) => Policy::Threshold(threshold),
            (schedule, _) => schedule,
        }
    }

    /// The seeds as a phrase.
    pub fn seed_list(&self) -> String {
        match self.seeds.as_slice() {
            [] | [_] => format!("seed {}", self.seed),
            seeds => format!("seeds {}", seeds.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")),
        }
    }
}

/// Which turns of a sample are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Turns {
    /// The first user message alone.
    First,
    /// Every user message, with the model's own answers before it.
    All,
}

/// What makes two targets the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetIdentity {
    /// Its folder, for people.
    pub path: String,
    /// Its hub id, if it was named by one.
    #[serde(default)]
    pub hub_id: Option<String>,
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
    /// Its hub id, if it was named by one.
    #[serde(default)]
    pub hub_id: Option<String>,
    /// Digest of its architecture.
    pub config_digest: String,
    /// Digest of probes of its weights.
    pub weights_digest: String,
    /// Drafted tokens per block.
    pub block_size: usize,
    /// Target layers whose states it reads.
    pub taps: Vec<i64>,
}
