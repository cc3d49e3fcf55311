//! `config.json` of a Hugging Face model, and the architecture that a family reads from it.

use std::fmt;
use std::path::{Path, PathBuf};

use deepspec_checkpoint::{CheckpointError, DecoderFamily, Fields};
use deepspec_core::atomic;
use deepspec_cost::estimate::{AttentionSize, ExpertsSize, ModelSize};
use deepspec_ops::kv_attention::row_capacity;
use deepspec_text::ChatFormat;
use serde_json::{Map, Value};
use tch::Kind;

use crate::ModelError;
use crate::nn::{Heads, LayerSpec, NormWeight};
use crate::weights::FusedTensor;

/// Maximum number of decoder layers. A larger number is a mistake in the config, and would exhaust memory.
pub const MAX_LAYERS: usize = 1024;

/// The architecture of a causal language model, from its config.json.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Model family, such as Qwen3.
    pub family: Family,
    /// d, the width of the residual stream.
    pub hidden_size: i64,
    /// V, rows of the embedding.
    pub vocab_size: i64,
    /// ε of the final norm.
    pub rms_norm_eps: f64,
    /// Maximum sequence length that the model was trained for.
    pub max_position_embeddings: usize,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Standard deviation of random weights.
    pub initializer_range: f64,
    /// How the final norm uses its weight.
    pub norm_weight: NormWeight,
    /// Factor on embeddings.
    pub embed_scale: f64,
    /// Factor on logits. The final norm multiplies its output by it, so that the LM head is used as it is stored:
    /// drafters share the head, and engines give it no factor.
    pub logit_scale: f64,
    /// Soft-cap c of the logits x, which become `c·tanh(x/c)`.
    pub logit_softcap: Option<f64>,
    /// Whether [`crate::TargetModel`] computes this architecture. If not, an engine computes its
    /// hidden states, and `layers` are those of drafters for it.
    pub has_forward: bool,
    /// Decoder layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// The whole config.json, for fields that only some readers need.
    pub raw: Map<String, Value>,
}

/// `num_hidden_layers`.
///
/// # Errors
/// If it is missing or not between 1 and [`MAX_LAYERS`].
pub fn layer_count(fields: &Fields) -> Result<usize, ModelError> {
    let key = "num_hidden_layers";
    let layers = fields.required_size::<u64>(key)? as usize;
    if layers <= MAX_LAYERS {
        return Ok(layers);
    }
    Err(fields.error(key, format!("{layers} is not between 1 and {MAX_LAYERS}")).into())
}

/// Checks heads for attention and rotary embeddings; `key_value` and `dim` are the keys that they came from.
///
/// # Errors
/// If key heads do not divide query heads, or the width is odd.
pub fn checked_heads(fields: &Fields, key_value: &str, dim: &str, heads: Heads) -> Result<Heads, ModelError> {
    if heads.query % heads.key_value != 0 {
        let problem = format!("{} does not divide the {} attention heads", heads.key_value, heads.query);
        return Err(fields.error(key_value, problem).into());
    }
    if heads.dim % 2 != 0 || heads.dim == 0 {
        let problem = format!("{} is no even width; rotary embedding needs pairs", heads.dim);
        return Err(fields.error(dim, problem).into());
    }
    Ok(heads)
}

/// Reads `dir/config.json` as a JSON object.
///
/// # Errors
/// If `dir` is not a folder, or the file is missing or not a JSON object.
pub fn read_json(dir: &Path) -> Result<(PathBuf, Map<String, Value>), ModelError> {
    let path = dir.join("config.json");
    if !path.is_file() {
        let problem = if dir.is_dir() {
            "the folder has no config.json; a model is a folder of config.json and safetensors, or a GGUF file, which is named itself"
        } else {
            "no such folder; models are read from local folders"
        };
        return Err(ModelError::NotAModel { path: dir.to_path_buf(), problem: problem.into() });
    }
    match serde_json::from_str(&atomic::read_text(&path)?) {
        Ok(Value::Object(map)) => Ok((path, map)),
        Ok(_) => Err(ModelError::NotAModel { path, problem: "expected a JSON object".into() }),
        Err(error) => Err(ModelError::NotAModel { path, problem: format!("not valid JSON: {error}") }),
    }
}

impl ModelConfig {
    /// Layers with attention.
    fn attention_layers(&self) -> impl Iterator<Item = &LayerSpec> {
        self.layers.iter().filter(|layer| layer.gated_delta.is_none())
    }

    /// Bytes of the states of `slots` sequences in layers with linear attention, whatever the sequences' lengths.
    pub fn linear_attention_bytes(&self, slots: usize, kind: Kind) -> usize {
        let specs = self.layers.iter().filter_map(|layer| layer.gated_delta);
        slots * specs.map(|spec| spec.sequence_bytes(kind)).sum::<usize>()
    }

    /// Number of values in the KV cache of `slots` sequences of up to `tokens` tokens, including the padding of
    /// their rows.
    pub fn kv_cache_numel(&self, slots: usize, tokens: usize) -> usize {
        let heads = self.attention_layers().map(|layer| layer.attention.heads);
        let row: usize = heads.map(|heads| 2 * heads.key_value as usize * heads.dim as usize).sum();
        slots * row_capacity(tokens) * row
    }

    /// Number of weights of embedding, head and projections. Norms are not counted: they are less than a thousandth of
    /// the weights.
    pub fn weight_count(&self) -> usize {
        let projections = |layer: &LayerSpec| layer.mixer_weights() + layer.mlp_weights();
        let ends = if self.tie_word_embeddings { 1 } else { 2 };
        let layers: i64 = self.layers.iter().map(projections).sum();
        (layers + ends * self.vocab_size * self.hidden_size) as usize
    }

    /// Sizes of the experts, which are equal in all layers that have them; None if all layers are dense.
    fn experts_size(&self) -> Option<ExpertsSize> {
        let mut found = self.layers.iter().filter_map(|layer| layer.experts);
        let experts = found.next()?;
        Some(ExpertsSize {
            layers: 1.0 + found.count() as f64,
            weights: (3 * self.hidden_size * experts.width) as f64,
            count: experts.count as f64,
            active: experts.active as f64,
        })
    }

    /// Sizes for cost estimates.
    pub fn model_size(&self) -> ModelSize {
        let layers = self.attention_layers().map(|layer| {
            let Heads { query, key_value, dim } = layer.attention.heads;
            AttentionSize {
                query_heads: query as usize,
                key_value_heads: key_value as usize,
                head_dim: dim as usize,
                window: layer.attention.window,
            }
        });
        ModelSize {
            weights: self.weight_count() as f64,
            embedding: (self.vocab_size * self.hidden_size) as f64,
            is_tied: self.tie_word_embeddings,
            layers: layers.collect(),
            experts: self.experts_size(),
        }
    }
}

/// Entry of `layer_types` for a layer with a window.
pub const SLIDING_LAYER_TYPE: &str = "sliding_attention";
/// Entry of `layer_types` for a layer without a window.
pub const FULL_LAYER_TYPE: &str = "full_attention";

/// Whether each layer has a window, by `layer_types`; None without that key.
///
/// # Errors
/// If the number of types is not the number of layers, or a type is unknown.
pub(crate) fn sliding_layers(fields: &Fields, layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(types) = fields.texts("layer_types")? else { return Ok(None) };
    if types.len() != layers {
        let problem = format!("{} types for {layers} layers", types.len());
        return Err(fields.error("layer_types", problem).into());
    }
    let sliding = |name: &&str| match *name {
        FULL_LAYER_TYPE => Ok(false),
        SLIDING_LAYER_TYPE => Ok(true),
        other => {
            let problem =
                format!("\"{other}\" is unknown; expected \"{SLIDING_LAYER_TYPE}\" or \"{FULL_LAYER_TYPE}\"");
            Err(fields.error("layer_types", problem))
        }
    };
    Ok(Some(types.iter().map(sliding).collect::<Result<_, CheckpointError>>()?))
}

/// A config.json.
pub(crate) type RawConfig = Map<String, Value>;

/// A family of causal language models.
pub struct TargetFamily {
    /// Names of the family and the form of its layers.
    pub decoder: &'static DecoderFamily,
    /// Classes of its checkpoints, as `architectures` names them.
    pub classes: &'static [&'static str],
    /// Reads a config.json.
    pub(crate) read: fn(&Fields) -> Result<ModelConfig, ModelError>,
    /// Tensors of a layer that hold several weights; None if each weight has its own tensor.
    pub(crate) fused: Option<fn(&LayerSpec) -> Vec<FusedTensor>>,
    /// Layers of the drafters for targets of this family.
    pub(crate) drafts: DraftLayers,
    /// The chat format of its models, where it has a name.
    pub chat: Option<ChatFormat>,
    /// Hub ids of models whose sizes are built in, with their config.json.
    pub shapes: &'static [(&'static str, &'static str)],
}

/// Layers of the drafters for a family of targets.
pub(crate) enum DraftLayers {
    /// Drafters have layers of this family.
    Own {
        /// Makes the config.json of a draft decoder with these layers from that of a target.
        config: fn(&RawConfig, &[LayerSpec]) -> RawConfig,
        /// The reason why draft layers cannot have these windows; None if they can.
        refuse_windows: fn(&[Option<usize>]) -> Option<&'static str>,
        /// Family whose layers the block drafters have; None if they have this family's.
        blocks: Option<Family>,
    },
    /// No engine runs drafters with layers of this family. Drafters have layers of another one, of the target's sizes.
    Other {
        /// Family of block drafters.
        blocks: Family,
        /// Family of the drafters that draft token by token.
        tokens: Family,
        /// Whether MTP layers are the family's own: its checkpoints store them, and engines load them from there.
        own_mtp: bool,
    },
}

/// One of [`crate::families`].
pub type Family = &'static TargetFamily;

impl TargetFamily {
    /// Whether drafters may have layers of this family.
    pub fn has_drafters(&self) -> bool {
        matches!(self.drafts, DraftLayers::Own { .. } | DraftLayers::Other { own_mtp: true, .. })
    }

    /// Names of the supported checkpoint classes, for messages.
    pub fn class(&self) -> String {
        self.classes.join(" or ")
    }
}

impl PartialEq for TargetFamily {
    fn eq(&self, other: &Self) -> bool {
        self.decoder == other.decoder
    }
}

impl fmt::Debug for TargetFamily {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.decoder.name)
    }
}

impl fmt::Display for TargetFamily {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.decoder.name)
    }
}
