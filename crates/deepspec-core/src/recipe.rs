//! The YAML recipe of one experiment: target, drafter, data and training.
//!
//! `deepspec-data cache` reads target and data, `deepspec-train` reads everything. All defaults
//! except the drafters' are defined here.

mod eval;
mod lora;
mod states;
mod template;
mod validate;

use std::borrow::Cow;
use std::path::PathBuf;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::Tap;
use crate::config::{ConfigError, Document};
use crate::env;

pub use eval::EvalRecipe;
pub use lora::LoraRecipe;
pub use states::{DEFAULT_STATES_FOLDER, StateServers, States, StatesStorage, check_server_urls};
pub use template::{GENERATION_RULES, TemplateEntry, TemplateRecipe};
pub use validate::require_at_least_one;

/// Default length in tokens at which sequences are cut.
pub const DEFAULT_MAX_LENGTH: usize = 4096;

/// One experiment.
///
/// `D` is the drafter: [`DrafterRecipe`] as a document has it, or the settings of a known kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Recipe")]
#[serde(deny_unknown_fields)]
pub struct Recipe<D> {
    /// Names the experiment; its checkpoints go to `logging.output_dir/name`.
    pub name: String,
    /// Seed of fresh weights, sample order and anchors.
    #[serde(default = "defaults::seed")]
    pub seed: u64,
    /// The target model.
    pub target: TargetRecipe,
    /// The drafter.
    pub drafter: D,
    /// Training data.
    pub data: DataRecipe,
    /// Training settings.
    #[serde(default)]
    pub train: TrainRecipe,
    /// Logs, checkpoints and evaluations during training.
    #[serde(default)]
    pub logging: LoggingRecipe,
    /// Evaluation every `logging.eval_every` steps; absent means the smoke suites.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval: Option<EvalRecipe>,
}

/// The target and where it is tapped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TargetRecipe {
    /// Folder of the model, or its hub id.
    pub model: String,
    /// Branch, tag or commit of a hub id; absent means its main branch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Layers whose raw output the drafter reads; `embedding` may stand first. MTP-1 reads none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layer_ids: Vec<Tap>,
}

/// A drafter whose settings have not been read: its kind, and a JSON value.
#[derive(Debug, Clone, PartialEq)]
pub struct DrafterRecipe {
    /// Names the kind.
    pub kind: String,
    /// The value under that name.
    pub settings: Value,
}

impl Serialize for DrafterRecipe {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map([(&self.kind, &self.settings)])
    }
}

/// The drafter registry adds the properties, because only it knows the drafter kinds.
impl JsonSchema for DrafterRecipe {
    fn schema_name() -> Cow<'static, str> {
        "DrafterRecipe".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": false})
    }
}

impl<'de> Deserialize<'de> for DrafterRecipe {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let kinds = Map::deserialize(deserializer)?;
        let count = kinds.len();
        match kinds.into_iter().next() {
            Some((kind, settings)) if count == 1 => Ok(Self { kind, settings }),
            _ => Err(D::Error::custom(format!("{count} kinds of drafters; expected one, with its settings"))),
        }
    }
}

/// The training data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DataRecipe {
    /// Where the target's states come from.
    pub states: States,
    /// JSONL files with the conversations; only for states that the target computes during training.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub input: Vec<String>,
    /// Device of a target that runs during training: auto, cpu, cuda or cuda:N; absent means the drafter's device.
    /// `cuda:{local_rank+N}` is another GPU for each process of a machine, counted from N.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_device: Option<String>,
    /// Mask rules of the target's chat format: `qwen`, `qwen2.5`, `gemma3`, `gemma4`, `llama3`, `mistral`, `granite`,
    /// `phi4`, `harmony`, `generation` (the template's tags), an entry, or the path of a YAML file with one.
    pub chat_template: TemplateRecipe,
    /// Given to conversations without a system message; absent means the chat template's own, an empty text means no message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_prompt: Option<String>,
    /// Sequences are cut here, in tokens.
    #[serde(default = "defaults::max_length")]
    pub max_length: usize,
}

/// Dtype of the working weights; masters are always float32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "Precision")]
pub enum TrainDtype {
    /// bfloat16.
    Bf16,
    /// float32.
    Fp32,
}

/// Samples whose weights a loss denominator sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LossNormalization {
    /// All samples of the optimiser step: no split of the batch changes the result.
    Global,
    /// Samples of each micro-batch, then the mean over the micro-batches, as the reference does.
    MicroBatch,
}

/// Sharding of the optimiser's state among processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ShardingStrategy {
    /// Each process keeps the whole state.
    NoShard,
    /// Each process keeps its share of float32 masters and moments; updated weights are distributed after every step.
    ShardOptimizer,
}

/// Backend of collective operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "Backend")]
pub enum DistBackend {
    /// NCCL among GPUs, Gloo among CPUs.
    Auto,
    /// NCCL, which needs a GPU for each process.
    Nccl,
    /// Gloo; tensors of a GPU are copied through host memory, which is slow, and processes may share a GPU.
    Gloo,
}

/// Optimisation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrainRecipe {
    /// Peak learning rate.
    pub lr: f64,
    /// Fraction of all steps that warm up.
    pub warmup_ratio: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Dtype of the working weights.
    pub precision: TrainDtype,
    /// Sequences per forward and process, at most.
    pub local_batch_size: usize,
    /// Tokens per forward and process, at most; a longer sequence has a forward of its own. Absent means any number. Refused with
    /// `loss_normalization: micro_batch`, whose losses would depend on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens_per_batch: Option<usize>,
    /// Sequences per optimiser step.
    pub global_batch_size: usize,
    /// Passes over the data.
    pub num_train_epochs: usize,
    /// Optimiser steps; overrides the epochs.
    pub max_train_steps: Option<usize>,
    /// Gradients are scaled down to this norm.
    pub max_grad_norm: f64,
    /// Samples whose weights a loss denominator sums.
    pub loss_normalization: LossNormalization,
    /// Sharding of the optimiser's state among processes.
    pub sharding_strategy: ShardingStrategy,
    /// Backend of collective operations.
    pub backend: DistBackend,
    /// Seconds that a process waits for the others before it gives up. Saving a checkpoint must fit into this time. Ten
    /// seconds of it, or a third if that is less, are reserved for error messages of the others.
    pub timeout_s: u64,
    /// Folder or hub id of a drafter of the same architecture whose weights a fresh run starts from; DSpark may start from
    /// DFlash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_from: Option<String>,
    /// Parts of the drafter that keep the weights of `init_from`, such as its `backbone` while the heads are trained.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub freeze: Vec<String>,
    /// LoRA: the weights of `init_from` are frozen, and small matrices beside linear layers learn; absent means that the
    /// weights themselves learn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraRecipe>,
    /// Whether the backward pass recomputes draft layers (activation checkpointing): less memory, a third more arithmetic in
    /// the layers. For drafters of whole blocks.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub recompute: bool,
}

impl Default for TrainRecipe {
    fn default() -> Self {
        Self {
            lr: 6e-4,
            warmup_ratio: 0.04,
            weight_decay: 0.0,
            precision: TrainDtype::Bf16,
            local_batch_size: 1,
            max_tokens_per_batch: None,
            global_batch_size: 512,
            num_train_epochs: 10,
            max_train_steps: None,
            max_grad_norm: 1.0,
            loss_normalization: LossNormalization::Global,
            sharding_strategy: ShardingStrategy::NoShard,
            backend: DistBackend::Auto,
            timeout_s: 600,
            init_from: None,
            freeze: vec![],
            lora: None,
            recompute: false,
        }
    }
}

/// Logs, checkpoints and evaluations during training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LoggingRecipe {
    /// Optimiser steps between log lines.
    pub logging_steps: usize,
    /// Optimiser steps between checkpoints; the last step always has one.
    pub checkpointing_steps: usize,
    /// Optimiser steps between measurements of the real accepted length, which the last step always has; absent means none. An
    /// evaluated step has a checkpoint too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_every: Option<usize>,
    /// Whether a TensorBoard event file is written beside the checkpoints.
    pub tensorboard: bool,
    /// Checkpoints go to a folder of the experiment's name in here.
    pub output_dir: String,
    /// The newest checkpoints that are kept, beside the best one; absent means all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_checkpoints: Option<usize>,
}

impl Default for LoggingRecipe {
    fn default() -> Self {
        Self {
            logging_steps: 10,
            checkpointing_steps: 3000,
            eval_every: None,
            tensorboard: true,
            output_dir: "~/checkpoints/deepspec".into(),
            keep_checkpoints: None,
        }
    }
}

mod defaults {
    pub fn seed() -> u64 {
        42
    }
    pub fn max_length() -> usize {
        super::DEFAULT_MAX_LENGTH
    }
}

impl DataRecipe {
    /// The system prompt of conversations without one; `own` is the chat template's default.
    pub fn default_system_prompt(&self, own: Option<&str>) -> Option<String> {
        self.system_prompt.as_deref().or(own).filter(|prompt| !prompt.is_empty()).map(str::to_string)
    }
}

impl Recipe<DrafterRecipe> {
    /// Reads and checks a recipe except for the drafter's settings.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn read(document: &Document) -> Result<Self, ConfigError> {
        let mut recipe: Self = document.read()?;
        recipe.data.chat_template = recipe.data.chat_template.resolve()?;
        recipe.validate().map_err(|(key, problem)| document.error(key, problem))?;
        Ok(recipe)
    }
}

impl<D> Recipe<D> {
    /// Replaces the recipe's drafter, which may have another type.
    pub fn with_drafter<E>(self, drafter: E) -> Recipe<E> {
        let Self { name, seed, target, data, train, logging, eval, .. } = self;
        Recipe { name, seed, target, drafter, data, train, logging, eval }
    }

    /// The folder of the cache; `None` if hidden states are never written.
    pub fn cache_dir(&self) -> Option<PathBuf> {
        self.data.states.dir().map(env::expand_home)
    }

    /// The files with the conversations; empty if the hidden states come from a cache.
    pub fn inputs(&self) -> Vec<PathBuf> {
        self.data.input.iter().map(|input| env::expand_home(input)).collect()
    }

    /// The folder of the experiment's checkpoints.
    pub fn output_dir(&self) -> PathBuf {
        env::expand_home(&self.logging.output_dir).join(&self.name)
    }
}
