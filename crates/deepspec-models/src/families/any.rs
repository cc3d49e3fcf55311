//! Targets without a family here. An engine computes their hidden states; a drafter needs their
//! sizes only, and gets dense Qwen3 layers of these sizes.

use std::path::Path;

use deepspec_checkpoint::Fields;
use serde_json::{Map, Value, json};

use super::{qwen3, read_family};
use crate::ModelError;
use crate::config::{ModelConfig, RawConfig, TargetFamily, read_json};

/// Objects of a multimodal config.json that hold the language model's config.
const TEXT_CONFIG_KEYS: [&str; 3] = ["text_config", "llm_config", "language_config"];
/// Keys for ε of the norms, in the order in which they are tried.
const EPS_KEYS: [&str; 6] =
    ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon"];
/// Maximum sequence length where a config has none.
const DEFAULT_MAX_POSITIONS: u64 = 32_768;
/// Head dimension of draft layers where the target compresses its keys and values (MLA).
const MLA_DRAFT_HEAD_DIM: u64 = 128;
/// Maximum number of key/value heads of such draft layers.
const MLA_DRAFT_KV_HEADS: u64 = 8;
/// Kinds of RoPE scaling that draft layers take over from such a target.
const COPIED_ROPE_TYPES: [&str; 3] = ["linear", "llama3", "yarn"];

/// Hub ids of models without a family here whose sizes are built in, with their config.json.
pub const SHAPES_WITHOUT_FAMILY: &[(&str, &str)] =
    &[("deepseek-ai/DeepSeek-V4-Flash", include_str!("../../../../configs/shapes/deepseek_v4_flash.json"))];

impl ModelConfig {
    /// Reads `dir/config.json` of a target of any architecture. If no family here reads it, the
    /// layers are dense Qwen3 layers of its sizes: drafters are built like these, and
    /// [`crate::TargetModel::load`] still refuses the target.
    ///
    /// # Errors
    /// As [`ModelConfig::load`]. A config without a family must name its sizes.
    pub fn load_any(dir: &Path) -> Result<Self, ModelError> {
        let (path, raw) = read_json(dir)?;
        Self::parse_any(&path, raw)
    }

    /// Parses an object that was read, as [`ModelConfig::load_any`] does; `path` is for errors.
    ///
    /// # Errors
    /// As [`ModelConfig::load_any`].
    pub fn parse_any(path: &Path, raw: Map<String, Value>) -> Result<Self, ModelError> {
        let fields = Fields::new(path, &raw);
        match read_family(&fields) {
            Ok(config) => Ok(Self { raw, ..config }),
            Err(refused) => {
                let is_known_family = TargetFamily::of_model_type(fields.text("model_type")?).is_some();
                read_sizes(&fields).map_err(|error| if is_known_family { refused } else { error })
            }
        }
    }
}

/// The part of a config.json that describes the language model; `None` if that is all of it.
///
/// # Errors
/// If its key is no object.
pub(crate) fn text_part<'a>(outer: &Fields<'a>) -> Result<Option<Fields<'a>>, ModelError> {
    Ok(TEXT_CONFIG_KEYS.iter().find_map(|key| outer.object(key).transpose()).transpose()?)
}

/// The `model_type` of a config.json, of its language model if that is a part of it; empty if it has
/// none.
///
/// # Errors
/// If a key has a wrong type.
pub fn text_model_type(path: &Path, raw: &RawConfig) -> Result<String, ModelError> {
    let outer = Fields::new(path, raw);
    let inner = text_part(&outer)?.map(|text| text.text("model_type")).transpose()?.flatten();
    Ok(inner.or(outer.text("model_type")?).unwrap_or_default().to_string())
}

/// The sizes of a config.json without a family, as the config of a Qwen3 model.
fn read_sizes(outer: &Fields) -> Result<ModelConfig, ModelError> {
    let text = text_part(outer)?;
    let fields = text.as_ref().unwrap_or(outer);
    let raw = as_qwen3_config(outer, fields)?;
    let config = (qwen3::FAMILY.read)(&Fields::new(outer.path, &raw))?;
    let is_gemma = is_gemma(&text_model_type(outer.path, outer.map)?);
    let embed_scale = match fields.number("embedding_multiplier")? {
        Some(factor) => factor,
        None if is_gemma => (config.hidden_size as f64).sqrt(),
        None => 1.0,
    };
    let logit_softcap = fields.number("final_logit_softcapping")?.filter(|cap| *cap > 0.0);
    Ok(ModelConfig { embed_scale, logit_softcap, has_forward: false, raw, ..config })
}

/// Whether a `model_type` is one of Gemma's, whose embeddings are scaled by √d and tied.
pub(crate) fn is_gemma(model_type: &str) -> bool {
    model_type.starts_with("gemma")
}

fn as_qwen3_config(outer: &Fields, fields: &Fields) -> Result<RawConfig, ModelError> {
    let size = |keys: &[&str]| -> Result<u64, ModelError> {
        for key in keys {
            if let Some(size) = fields.size::<u64>(key)? {
                return Ok(size);
            }
        }
        Err(fields.error(keys[0], "missing; drafters need this size of the target").into())
    };
    let (hidden, heads) = (size(&["hidden_size", "n_embd"])?, size(&["num_attention_heads", "n_head"])?);
    let mut key_value = fields.size::<u64>("num_key_value_heads")?.unwrap_or(heads);
    let (mut heads, mut dim) = (heads, fields.size::<u64>("head_dim")?.or(Some(hidden / heads)));
    if fields.size::<u64>("kv_lora_rank")?.is_some() {
        heads = (hidden / MLA_DRAFT_HEAD_DIM).max(1);
        key_value = (1..=MLA_DRAFT_KV_HEADS.min(heads)).rev().find(|n| heads % n == 0).unwrap_or(1);
        dim = Some(MLA_DRAFT_HEAD_DIM);
    }
    // In a mixture of experts, this may be the width of one expert.
    let intermediate = fields.size::<u64>("intermediate_size")?.filter(|width| *width >= hidden);
    let eps = EPS_KEYS.iter().find_map(|key| fields.number(key).transpose()).transpose()?;
    let tied = match fields.flag("tie_word_embeddings")?.or(outer.flag("tie_word_embeddings")?) {
        Some(tied) => tied,
        None => fields.text("model_type")?.is_some_and(is_gemma),
    };
    let mut raw = Map::new();
    let mut set = |key: &str, value: Value| raw.insert(key.into(), value);
    set("architectures", json!(["Qwen3ForCausalLM"]));
    set("model_type", json!("qwen3"));
    set("vocab_size", json!(size(&["vocab_size"])?));
    set("hidden_size", json!(hidden));
    set("intermediate_size", json!(intermediate.unwrap_or(3 * hidden)));
    set("num_hidden_layers", json!(size(&["num_hidden_layers", "n_layer"])?));
    set("num_attention_heads", json!(heads));
    set("num_key_value_heads", json!(key_value));
    set("head_dim", json!(dim));
    let positions = fields.size::<u64>("max_position_embeddings")?.unwrap_or(DEFAULT_MAX_POSITIONS);
    set("max_position_embeddings", json!(positions));
    set("rms_norm_eps", json!(eps.unwrap_or(1e-6)));
    set("tie_word_embeddings", json!(tied));
    set("hidden_act", json!("silu"));
    set("attention_bias", json!(false));
    for (key, value) in rope_keys(fields)? {
        set(&key, value);
    }
    for key in ["bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"] {
        if let Some(value) = fields.map.get(key).or(outer.map.get(key)).filter(|value| !value.is_null()) {
            set(key, value.clone());
        }
    }
    Ok(raw)
}

/// `rope_theta` and a known kind of `rope_scaling` of the target's full-attention layers.
fn rope_keys(fields: &Fields) -> Result<Vec<(String, Value)>, ModelError> {
    let mut keys = vec![];
    let parameters = match fields.object("rope_parameters")? {
        Some(parameters) => Some(parameters.object("full_attention")?.unwrap_or(parameters)),
        None => fields.object("rope_scaling")?,
    };
    let inner = parameters.as_ref().map(|object| object.number("rope_theta")).transpose()?.flatten();
    if let Some(theta) = inner.or(fields.number("rope_theta")?) {
        keys.push(("rope_theta".into(), json!(theta)));
    }
    if let Some(parameters) = parameters {
        let kind = parameters.text("rope_type")?.or(parameters.text("type")?).unwrap_or("default");
        if COPIED_ROPE_TYPES.contains(&kind) {
            keys.push(("rope_scaling".into(), Value::Object(parameters.map.clone())));
        }
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn parse(config: Value) -> Result<ModelConfig, String> {
        let Value::Object(raw) = config else { panic!("a config is an object") };
        ModelConfig::parse_any(Path::new("config.json"), raw).map_err(|error| error.to_string())
    }

    #[test]
    fn a_mixture_of_experts_has_dense_draft_layers_of_its_sizes() {
        let config = parse(json!({
            "model_type": "glm4_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "num_hidden_layers": 48, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "vocab_size": 151_936, "rope_theta": 1e6, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6,
        }))
        .unwrap();
        assert!(!config.has_forward);
        assert_eq!((config.layers.len(), config.hidden_size, config.vocab_size), (48, 2048, 151_936));
        let layer = &config.layers[0];
        assert_eq!((layer.intermediate_size, layer.attention.heads.key_value), (6144, 4));
        assert_eq!((layer.rope.theta, layer.qk_norm), (1e6, true));
        assert_eq!(config.raw["model_type"], "qwen3");
    }

    #[test]
    fn the_text_part_of_a_hybrid_is_read() {
        let config = parse(json!({
            "model_type": "qwen4_moe", "tie_word_embeddings": true,
            "text_config": {
                "model_type": "qwen4_moe_text", "hidden_size": 2560, "num_attention_heads": 16, "num_key_value_heads": 4,
                "head_dim": 256, "num_hidden_layers": 32, "intermediate_size": 9216, "vocab_size": 248_320,
                "rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25},
            },
        }))
        .unwrap();
        assert_eq!((config.layers.len(), config.layers[0].rope.theta), (32, 1e7));
        assert!(!config.has_forward);
        assert!(config.tie_word_embeddings);
    }

    #[test]
    fn compressed_keys_become_plain_draft_heads() {
        let config = parse(json!({
            "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61,
            "kv_lora_rank": 512, "intermediate_size": 18_432, "vocab_size": 129_280,
            "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        }))
        .unwrap();
        let heads = config.layers[0].attention.heads;
        assert_eq!((heads.query, heads.key_value, heads.dim), (56, 8, 128));
        assert!(config.raw["rope_scaling"].is_object());
    }

    #[test]
    fn a_family_that_is_here_keeps_its_forward_and_its_errors() {
        let qwen3 = json!({
            "model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
            "intermediate_size": 128, "vocab_size": 100,
        });
        assert!(parse(qwen3.clone()).unwrap().has_forward);
        // Biases are not computed here, but an engine computes them.
        let mut biased = qwen3.clone();
        biased["attention_bias"] = json!(true);
        assert!(!parse(biased).unwrap().has_forward);
        let mut broken = qwen3;
        broken["hidden_size"] = json!("64");
        assert!(parse(broken).unwrap_err().contains("`hidden_size`"));
        let unknown = parse(json!({"model_type": "new", "hidden_size": 64, "num_attention_heads": 4}));
        assert!(unknown.unwrap_err().contains("`vocab_size`: missing; drafters need this size"));
    }
}
