//! The YAML of one experiment: which target, which drafter, which data, how it is trained.
//!
//! Shared by `deepspec-data cache` (target, data) and `deepspec-train` (all of it). Every default is written here and nowhere else.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::config::{self, ConfigError};
use crate::env;

/// One experiment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Names the experiment; its checkpoints go to `logging.output_dir/name`.
    pub name: String,
    /// Seed of fresh weights, sample order and anchors.
    #[serde(default = "defaults::seed")]
    pub seed: u64,
    /// The model drafted for.
    pub target: TargetRecipe,
    /// The model that drafts.
    pub drafter: DrafterRecipe,
    /// What it learns from.
    pub data: DataRecipe,
    /// How it learns.
    #[serde(default)]
    pub train: TrainRecipe,
    /// What is written while it learns.
    #[serde(default)]
    pub logging: LoggingRecipe,
}

/// The target and where it is tapped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetRecipe {
    /// Folder of the model.
    pub model: String,
    /// Layers whose raw output the drafter reads; `embedding` may stand first.
    pub layer_ids: Vec<LayerId>,
}

/// A place in the target: the embedding's output, or a decoder layer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerId(pub i64);

impl Serialize for LayerId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0 == -1 { serializer.serialize_str("embedding") } else { serializer.serialize_i64(self.0) }
    }
}

impl<'de> Deserialize<'de> for LayerId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        let layer = value.as_i64().filter(|&id| id >= 0).or_else(|| (value == "embedding").then_some(-1));
        layer.map(Self).ok_or_else(|| {
            serde::de::Error::custom(format!("{value} is no layer; expected an integer from 0, or embedding"))
        })
    }
}

/// The drafter, tagged by its algorithm.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DrafterRecipe {
    /// Parallel block drafter with sequential heads.
    Dspark(BlockRecipe),
    /// The same without heads, trained with cross entropy.
    Dflash(BlockRecipe),
}

/// A block drafter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockRecipe {
    /// γ, drafted tokens per block.
    pub block_size: usize,
    /// Decoder layers of the drafter.
    pub num_draft_layers: usize,
    /// A token that never occurs in text; stands for what is to be predicted.
    pub mask_token_id: i64,
    /// Blocks per training sequence.
    #[serde(default = "defaults::num_anchors")]
    pub num_anchors: usize,
    /// The Markov head; absent means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub markov: Option<Markov>,
    /// The confidence head; absent means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confidence: Option<ConfidenceRecipe>,
    /// Weights of the losses; absent means the algorithm's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<LossRecipe>,
}

/// How the bias on the logits depends on the previous token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MarkovKind {
    /// `W2 e`.
    Vanilla,
    /// `W2 (σ(G[h; e] + b) ⊙ e)`.
    Gated,
    /// `W2 tanh(o)` of a gated recurrent state.
    Rnn,
}

/// The Markov head: a low-rank correction of the logits by the previous token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Markov {
    /// Its form.
    #[serde(rename = "type")]
    pub kind: MarkovKind,
    /// r, its rank.
    pub rank: i64,
}

/// The confidence head.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfidenceRecipe {
    /// Whether it also reads the previous token's Markov embedding.
    pub with_markov: bool,
    /// Weight of its loss.
    #[serde(default = "defaults::one")]
    pub alpha: f64,
}

/// Weights of the block losses.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossRecipe {
    /// Weight of the cross entropy with the label.
    pub ce_alpha: f64,
    /// Weight of ‖p^d − p^t‖₁.
    pub l1_alpha: f64,
    /// Position k of a block weighs exp(−k / this).
    #[serde(default = "defaults::decay_gamma")]
    pub decay_gamma: f64,
}

/// The training data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataRecipe {
    /// Where the target's states come from.
    pub states: States,
    /// Mask rules of the target's chat format (`qwen`, `gemma4`).
    pub chat_template: String,
    /// Given to conversations without a system message; absent means the chat template's own, an empty text means no message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_prompt: Option<String>,
    /// Sequences are cut here, in tokens.
    #[serde(default = "defaults::max_length")]
    pub max_length: usize,
}

/// The source of target states.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum States {
    /// A folder built by `deepspec-data cache build`.
    Cache(String),
}

/// Kind of the working weights; masters are always float32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// bfloat16.
    Bf16,
    /// float32.
    Fp32,
}

/// Whose weights a denominator sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossNormalization {
    /// The whole optimiser step: no split of the batch changes the result.
    Global,
    /// Each micro-batch, then the mean over them, as the reference does.
    MicroBatch,
}

/// Optimisation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainRecipe {
    /// Peak learning rate.
    pub lr: f64,
    /// Fraction of all steps that warm up.
    pub warmup_ratio: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Kind of the working weights.
    pub precision: Precision,
    /// Sequences per forward and process.
    pub local_batch_size: usize,
    /// Sequences per optimiser step.
    pub global_batch_size: usize,
    /// Passes over the data.
    pub num_train_epochs: usize,
    /// Optimiser steps; overrides the epochs.
    pub max_train_steps: Option<usize>,
    /// Gradients are scaled down to this norm.
    pub max_grad_norm: f64,
    /// Whose weights a loss denominator sums.
    pub loss_normalization: LossNormalization,
}

impl Default for TrainRecipe {
    fn default() -> Self {
        Self {
            lr: 6e-4,
            warmup_ratio: 0.04,
            weight_decay: 0.0,
            precision: Precision::Bf16,
            local_batch_size: 1,
            global_batch_size: 512,
            num_train_epochs: 10,
            max_train_steps: None,
            max_grad_norm: 1.0,
            loss_normalization: LossNormalization::Global,
        }
    }
}

/// What is written, and how often.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoggingRecipe {
    /// Optimiser steps between log lines.
    pub logging_steps: usize,
    /// Optimiser steps between checkpoints; the last step always has one.
    pub checkpointing_steps: usize,
    /// Checkpoints go to a folder of the experiment's name in here.
    pub output_dir: String,
}

impl Default for LoggingRecipe {
    fn default() -> Self {
        Self { logging_steps: 10, checkpointing_steps: 3000, output_dir: "~/checkpoints/deepspec".into() }
    }
}

mod defaults {
    pub fn seed() -> u64 {
        42
    }
    pub fn num_anchors() -> usize {
        512
    }
    pub fn max_length() -> usize {
        4096
    }
    pub fn decay_gamma() -> f64 {
        4.0
    }
    pub fn one() -> f64 {
        1.0
    }
}

impl DataRecipe {
    /// The system prompt of conversations that have none; `own` is the chat template's default.
    pub fn default_system(&self, own: Option<&str>) -> Option<String> {
        self.system_prompt.as_deref().or(own).filter(|prompt| !prompt.is_empty()).map(str::to_string)
    }
}

impl DrafterRecipe {
    /// The block drafter's settings.
    pub fn block(&self) -> &BlockRecipe {
        match self {
            Self::Dspark(block) | Self::Dflash(block) => block,
        }
    }

    /// The loss weights: as given, else 0.1 / 0.9 for DSpark and 1 / 0 for DFlash.
    pub fn loss(&self) -> LossRecipe {
        let (ce_alpha, l1_alpha) = match self {
            Self::Dspark(_) => (0.1, 0.9),
            Self::Dflash(_) => (1.0, 0.0),
        };
        self.block().loss.unwrap_or(LossRecipe { ce_alpha, l1_alpha, decay_gamma: defaults::decay_gamma() })
    }
}

impl Recipe {
    /// Reads and checks a recipe, with `key=value` overrides.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self, ConfigError> {
        let recipe: Self = config::load(path, overrides)?;
        recipe.validate().map_err(|(key, problem)| ConfigError::Key {
            path: path.to_path_buf(),
            line: None,
            key: key.into(),
            problem,
        })?;
        Ok(recipe)
    }

    /// The folder of the target.
    pub fn target_dir(&self) -> PathBuf {
        env::expand_home(&self.target.model)
    }

    /// The tapped layers; −1 is the embedding.
    pub fn taps(&self) -> Vec<i64> {
        self.target.layer_ids.iter().map(|id| id.0).collect()
    }

    /// The folder of the cache.
    pub fn cache_dir(&self) -> PathBuf {
        let States::Cache(dir) = &self.data.states;
        env::expand_home(dir)
    }

    /// The folder of the experiment's checkpoints.
    pub fn output_dir(&self) -> PathBuf {
        env::expand_home(&self.logging.output_dir).join(&self.name)
    }

    fn validate(&self) -> Result<(), (&'static str, String)> {
        let positive = [
            ("train.local_batch_size", self.train.local_batch_size),
            ("train.global_batch_size", self.train.global_batch_size),
            ("logging.logging_steps", self.logging.logging_steps),
            ("logging.checkpointing_steps", self.logging.checkpointing_steps),
            ("data.max_length", self.data.max_length),
            ("drafter.block_size", self.drafter.block().block_size),
            ("drafter.num_draft_layers", self.drafter.block().num_draft_layers),
            ("drafter.num_anchors", self.drafter.block().num_anchors),
            ("train.max_train_steps", self.train.max_train_steps.unwrap_or(1)),
            ("train.num_train_epochs", self.train.max_train_steps.map_or(self.train.num_train_epochs, |_| 1)),
        ];
        if let Some((key, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err((key, "must be at least 1".into()));
        }
        if self.name.is_empty() || self.name.contains(['/', '\\']) || self.name.starts_with('.') {
            return Err(("name", format!("\"{}\" cannot name a folder", self.name)));
        }
        if !(self.train.lr > 0.0 && self.train.lr.is_finite()) {
            return Err(("train.lr", format!("{} is no positive number", self.train.lr)));
        }
        if !(0.0..1.0).contains(&self.train.warmup_ratio) {
            return Err(("train.warmup_ratio", format!("{} is not in [0, 1)", self.train.warmup_ratio)));
        }
        if !self.train.weight_decay.is_finite() || self.train.weight_decay < 0.0 {
            return Err(("train.weight_decay", format!("{} is no number from 0", self.train.weight_decay)));
        }
        if self.train.max_grad_norm.is_nan() || self.train.max_grad_norm <= 0.0 {
            return Err(("train.max_grad_norm", format!("{} is not positive", self.train.max_grad_norm)));
        }
        if self.target.layer_ids.is_empty()
            || self.target.layer_ids.windows(2).any(|pair| pair[0].0 >= pair[1].0)
        {
            return Err((
                "target.layer_ids",
                "expected at least one layer, strictly increasing, `embedding` first".into(),
            ));
        }
        let block = self.drafter.block();
        if matches!(self.drafter, DrafterRecipe::Dflash(_))
            && (block.markov.is_some() || block.confidence.is_some())
        {
            return Err((
                "drafter.dflash",
                "DFlash has no Markov and no confidence head; use `dspark`".into(),
            ));
        }
        if block.confidence.is_some_and(|confidence| confidence.with_markov) && block.markov.is_none() {
            return Err((
                "drafter.dspark.confidence.with_markov",
                "there is no Markov head to read from".into(),
            ));
        }
        if block.confidence.is_some_and(|confidence| !confidence.alpha.is_finite() || confidence.alpha < 0.0)
        {
            return Err(("drafter.dspark.confidence.alpha", "must be a number from 0".into()));
        }
        if block.markov.is_some_and(|markov| markov.rank < 1) {
            return Err((
                "drafter.dspark.markov.rank",
                "must be at least 1; leave `markov` out for no head".into(),
            ));
        }
        let loss = self.drafter.loss();
        if loss.decay_gamma.is_nan() || loss.decay_gamma <= 0.0 {
            return Err(("drafter.loss.decay_gamma", "must be positive".into()));
        }
        if [loss.ce_alpha, loss.l1_alpha].iter().any(|alpha| !alpha.is_finite() || *alpha < 0.0) {
            return Err(("drafter.loss", "ce_alpha and l1_alpha must be numbers from 0".into()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "
name: tiny
target: {model: assets/tiny-target, layer_ids: [embedding, 1, 3]}
drafter:
  dspark:
    block_size: 7
    num_draft_layers: 2
    mask_token_id: 5
    markov: {type: vanilla, rank: 32}
    confidence: {with_markov: true}
data: {states: {cache: runs/cache}, chat_template: qwen}
";

    fn read(text: &str, overrides: &[&str]) -> Result<Recipe, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("recipe.yaml");
        std::fs::write(&path, text).unwrap();
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        Recipe::load(&path, &overrides).map_err(|error| error.to_string())
    }

    #[test]
    fn a_minimal_recipe_takes_the_defaults_and_survives_a_round_trip() {
        let recipe = read(MINIMAL, &["train.lr=3e-4", "train.precision=fp32"]).unwrap();
        assert_eq!(recipe.taps(), [-1, 1, 3]);
        assert_eq!((recipe.seed, recipe.train.lr, recipe.train.precision), (42, 3e-4, Precision::Fp32));
        assert_eq!((recipe.drafter.loss().ce_alpha, recipe.drafter.loss().l1_alpha), (0.1, 0.9));
        assert_eq!(read(&config::to_yaml(&recipe).unwrap(), &[]).unwrap(), recipe);
    }

    #[test]
    fn mistakes_are_named() {
        let wrong = |change: &str, hint: &str| {
            let error = read(MINIMAL, &[change]).unwrap_err();
            assert!(error.contains(hint), "{change}: {error}");
        };
        wrong("drafter.dspark.blok_size=3", "did you mean `block_size`?");
        wrong("train.global_batch_size=0", "train.global_batch_size");
        wrong("target.layer_ids=[3, 1]", "strictly increasing");
        wrong("target.layer_ids=[-1]", "expected an integer from 0, or embedding");
        wrong("data.states=disk", "cache");
        wrong("drafter.dspark.markov.rank=0", "leave `markov` out");
        wrong("name=a/b", "cannot name a folder");
        let dflash = MINIMAL.replace("dspark:", "dflash:");
        assert!(read(&dflash, &[]).unwrap_err().contains("use `dspark`"));
    }
}
