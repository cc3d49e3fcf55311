//! Recipe and config of an assistant: its sizes, and the target's layers whose keys and values it reads.

use std::path::Path;

use deepspec_checkpoint::{Fields, QUANTISATION_KEYS};
use deepspec_core::Tap;
use deepspec_core::cli::UsageError;
use deepspec_core::recipe::require_at_least_one;
use deepspec_models::config::{MAX_LAYERS, read_json};
use deepspec_models::nn::{AttentionSpec, Heads, LayerSpec};
use deepspec_models::{ModelConfig, ModelError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::block_common::LayerType;
use crate::draft_model::WarmStartCheck;
use crate::token_common::{check_max_steps, check_steps};
use crate::{ConfigIssue, MtpRecipe};

/// Name of the embedding, which is the head too if they are tied.
const EMBED_KEY: &str = "model.embed_tokens.weight";
/// Name of the head.
const HEAD_KEY: &str = "lm_head.weight";
/// Prefix of the `model_type` of the target family whose assistants have a class of their own.
const UNIFIED: &str = "gemma4_unified";
/// Keys that [`ModelConfig::draft_decoder`] writes and assistants lack.
const KEYS_OF_OTHER_DRAFTERS: [&str; 2] = ["target_model_type", "target_text_model_type"];

/// Recipe section of an assistant. Sizes are by default those of google/gemma-4-12B-it-assistant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AssistantRecipe {
    /// Steps of training, K. Training measures accepted lengths with as many drafted tokens.
    pub num_speculative_steps: usize,
    /// Weight of step j in the loss is `step_weight_beta`^j over the sum of all steps' powers.
    pub step_weight_beta: f64,
    /// Hidden size of the assistant, which may be another than the target's.
    pub hidden_size: usize,
    /// Width inside the MLPs.
    pub intermediate_size: usize,
    /// Query heads of every layer. Heads of keys and values are the target's.
    pub num_attention_heads: usize,
    /// Attention of each layer. Both types occur, and the last layer has full attention.
    pub layer_types: Vec<LayerType>,
}

impl Default for AssistantRecipe {
    fn default() -> Self {
        let MtpRecipe { num_speculative_steps, step_weight_beta } = MtpRecipe::default();
        let sliding = LayerType::SlidingAttention;
        Self {
            num_speculative_steps,
            step_weight_beta,
            hidden_size: 1024,
            intermediate_size: 8192,
            num_attention_heads: 16,
            layer_types: vec![sliding, sliding, sliding, LayerType::FullAttention],
        }
    }
}

impl AssistantRecipe {
    /// Checks values against their ranges.
    ///
    /// # Errors
    /// A key of the recipe, and the problem with its value.
    pub fn check(&self) -> Result<(), ConfigIssue> {
        check_steps(self.num_speculative_steps, self.step_weight_beta)?;
        check_max_steps(self.num_speculative_steps)?;
        require_at_least_one(&[
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
        ])?;
        let types = &self.layer_types;
        if types.len() > MAX_LAYERS {
            return Err(("layer_types", format!("{} layers are more than {MAX_LAYERS}", types.len())));
        }
        if !types.contains(&LayerType::SlidingAttention) || !types.contains(&LayerType::FullAttention) {
            let problem = "an assistant has layers of sliding_attention and of full_attention";
            return Err(("layer_types", problem.into()));
        }
        Ok(())
    }
}

/// Sizes and layers of an assistant.
#[derive(Debug, Clone)]
pub struct AssistantConfig {
    /// The assistant's layers, with the head counts of the target's keys and values.
    pub model: ModelConfig,
    /// d, hidden size of the target.
    pub backbone_hidden_size: i64,
    /// Whether the embedding is the head.
    pub is_tied: bool,
}

/// A layer of the target whose keys and values the assistant reads.
#[derive(Debug, Clone)]
pub struct KeySource {
    /// Index of the target's layer.
    pub layer: usize,
    /// The target's layer.
    pub spec: LayerSpec,
    /// Attention of the assistant's queries to its keys.
    pub attention: AttentionSpec,
}

impl KeySource {
    /// The tap at the input of the layer.
    pub fn tap(&self) -> Tap {
        self.layer.checked_sub(1).map_or(Tap::Embedding, |before| Tap::Layer(before as u32))
    }
}

impl AssistantConfig {
    /// Reads config.json in `dir`.
    ///
    /// # Errors
    /// If a key is missing, has a wrong type, or names a feature that is not supported.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        let (path, raw) = read_json(dir)?;
        let fields = Fields::new(&path, &raw);
        let problem = "heads of centroids, which assistants of E2B and E4B have, are not supported";
        fields.refuse_if_on("use_ordered_embeddings", problem)?;
        let text = fields.required_object("text_config")?;
        let (layers, shared) =
            (text.required_size("num_hidden_layers")?, text.count("num_kv_shared_layers")?);
        if let Some(shared) = shared.filter(|shared| ![0, layers].contains(shared)) {
            let problem = format!("{shared}; expected all {layers} layers of an assistant");
            return Err(text.error("num_kv_shared_layers", problem).into());
        }
        // A layer of a target has keys of its own.
        let mut own = text.map.clone();
        own.insert("num_kv_shared_layers".into(), json!(0));
        let backbone_hidden_size = fields.required_size("backbone_hidden_size")?;
        let is_tied = fields.flag("tie_word_embeddings")?.unwrap_or(true);
        Ok(Self { model: ModelConfig::parse(&path, own)?, backbone_hidden_size, is_tied })
    }

    /// The assistant of a recipe for this target.
    ///
    /// # Errors
    /// A key of the recipe, and the problem with its value.
    pub fn of_recipe(own: &AssistantRecipe, target: &ModelConfig) -> Result<Self, ConfigIssue> {
        let window = target.layers.iter().find_map(|layer| layer.attention.window);
        let windows: Vec<Option<usize>> = own
            .layer_types
            .iter()
            .map(|kind| window.filter(|_| *kind == LayerType::SlidingAttention))
            .collect();
        let family = target.family.decoder.name;
        if family != "Gemma 4" {
            let problem = format!("assistants are for targets of Gemma 4, and this one is of {family}");
            return Err(("target.model", problem));
        }
        if window.is_none() {
            return Err(("target.model", "assistants are for targets with a sliding layer".into()));
        }
        let decoder = target.draft_decoder(&windows).map_err(|error| ("layer_types", error.to_string()))?;
        let query = own.num_attention_heads as i64;
        let key_value = |layer: &LayerSpec| layer.attention.heads.key_value;
        if let Some(heads) = decoder.layers.iter().map(key_value).find(|heads| query % heads != 0) {
            let problem = format!("{query} is no multiple of the target's {heads} key/value heads");
            return Err(("num_attention_heads", problem));
        }
        let mut raw = decoder.raw;
        let of_target = KEYS_OF_OTHER_DRAFTERS.map(|key| raw.remove(key));
        let has_own_class = of_target.iter().flatten().any(|value| is_unified(value.as_str()));
        let model_type = if has_own_class { "gemma4_unified_text" } else { "gemma4_text" };
        raw.insert("model_type".into(), json!(model_type));
        raw.insert("hidden_size".into(), json!(own.hidden_size));
        raw.insert("intermediate_size".into(), json!(own.intermediate_size));
        raw.insert("num_attention_heads".into(), json!(query));
        // The target's cap is not the assistant's, whose logits vLLM would cap.
        raw.insert("final_logit_softcapping".into(), Value::Null);
        if !has_own_class {
            // Defaults of other targets, with which transformers refuses an assistant.
            raw.insert("vocab_size_per_layer_input".into(), json!(0));
            raw.insert("use_double_wide_mlp".into(), json!(false));
        }
        for key in ["architectures", "torch_dtype", "dtype"].iter().chain(&QUANTISATION_KEYS) {
            raw.remove(*key);
        }
        let model = ModelConfig::parse(Path::new("config.json"), raw)
            .map_err(|error| ("layer_types", error.to_string()))?;
        Ok(Self { model, backbone_hidden_size: target.hidden_size, is_tied: true })
    }

    /// Contents of config.json, as transformers and engines read them.
    pub fn to_json(&self) -> Map<String, Value> {
        let (class, model_type) = if is_unified(self.model.raw.get("model_type").and_then(Value::as_str)) {
            ("Gemma4UnifiedAssistantForCausalLM", "gemma4_unified_assistant")
        } else {
            ("Gemma4AssistantForCausalLM", "gemma4_assistant")
        };
        let mut text = self.model.raw.clone();
        text.insert("num_kv_shared_layers".into(), json!(self.model.layers.len()));
        text.insert("dtype".into(), json!("bfloat16"));
        let config = json!({
            "architectures": [class],
            "model_type": model_type,
            "backbone_hidden_size": self.backbone_hidden_size,
            "use_ordered_embeddings": false,
            "tie_word_embeddings": self.is_tied,
            "dtype": "bfloat16",
            "text_config": text,
        });
        match config {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }

    /// Name of the head's tensor.
    pub fn head_key(&self) -> &'static str {
        if self.is_tied { EMBED_KEY } else { HEAD_KEY }
    }

    /// Requires that an assistant of config `there` has the sizes of this one.
    pub fn compare_for_warm_start(&self, there: &Self, transfer: &mut WarmStartCheck) {
        transfer.compare_decoders(&there.model, &self.model);
        transfer.compare("backbone_hidden_size", there.backbone_hidden_size, self.backbone_hidden_size);
        transfer.compare("tie_word_embeddings", there.is_tied, self.is_tied);
    }

    /// The target's layers whose keys and values the assistant reads: the last one of each attention type. Layers ascend.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] with all that differs.
    pub fn key_sources(&self, target: &ModelConfig) -> Result<Vec<KeySource>, ModelError> {
        let Self { model, backbone_hidden_size, .. } = self;
        if target.family.decoder.name != model.family.decoder.name {
            let (own, theirs) = (model.family, target.family);
            let problem = format!(
                "the assistant does not belong to this target: it is one of {own}, the target is {theirs}"
            );
            return Err(ModelError::Mismatch(UsageError(problem)));
        }
        let mut differences = vec![];
        let mut compare = |what: &str, own: i64, theirs: i64| {
            let differs = || format!("{what} {theirs}, the assistant was trained for {own}");
            differences.extend((own != theirs).then(differs));
        };
        compare("hidden_size", *backbone_hidden_size, target.hidden_size);
        compare("vocab_size", model.vocab_size, target.vocab_size);
        let is_sliding = |layer: &LayerSpec| layer.attention.window.is_some();
        let (mut sources, mut missing) = (vec![], vec![]);
        for (sliding, name) in [(true, "sliding_attention"), (false, "full_attention")] {
            let mut layers = model.layers.iter().filter(|layer| is_sliding(layer) == sliding);
            let Some(own) = layers.next() else { continue };
            if layers.any(|other| other.attention != own.attention) {
                missing.push(format!("another number of heads in some layers of {name} of the assistant"));
            }
            let Some(layer) = target.layers.iter().rposition(|layer| is_sliding(layer) == sliding) else {
                missing.push(format!("no layer of {name}"));
                continue;
            };
            let (spec, attention) = (target.layers[layer].clone(), own.attention);
            let heads = |layer: &LayerSpec| layer.attention.heads;
            let (Heads { key_value, dim, .. }, theirs) = (attention.heads, heads(&spec));
            compare("num_key_value_heads", key_value, theirs.key_value);
            compare("head_dim", dim, theirs.dim);
            let window = |layer: &LayerSpec| layer.attention.window.unwrap_or(0) as i64;
            compare("sliding_window", window(own), window(&spec));
            // A query is one position behind the last key.
            let attention = AttentionSpec { window: attention.window.map(|window| window - 1), ..attention };
            sources.push(KeySource { layer, spec, attention });
        }
        differences.extend(missing);
        if !differences.is_empty() {
            let problem =
                format!("the assistant does not belong to this target: there is {}", differences.join("; "));
            return Err(ModelError::Mismatch(UsageError(problem)));
        }
        sources.sort_by_key(|source| source.layer);
        Ok(sources)
    }
}

/// Whether a `model_type` is of the family whose assistants have a class of their own.
fn is_unified(model_type: Option<&str>) -> bool {
    model_type.is_some_and(|name| name.starts_with(UNIFIED))
}

/// Whether `name` is the embedding or the head. Some tools store a tied head under both names. An embedding has no other use.
pub fn is_own_end(name: &str) -> bool {
    [EMBED_KEY, HEAD_KEY].contains(&name)
}

/// Checks config.json in `dir` as [`Assistant::load`](super::Assistant::load) does.
///
/// # Errors
/// As [`AssistantConfig::load`].
pub fn check_config(dir: &Path) -> Result<(), ModelError> {
    AssistantConfig::load(dir).map(drop)
}
