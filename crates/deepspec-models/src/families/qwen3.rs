//! Qwen3 (dense): one kind of layer, with or without a sliding window.

use serde_json::{Map, Value as Json, json};

use super::{TargetFamily, draft, rope, sliding_layers};
use crate::ModelError;
use crate::config::{Fields, ModelConfig};
use crate::nn::{Activation, AttentionSpec, Heads, LayerSpec, Norms, Value};

/// Qwen3, dense.
pub(super) const FAMILY: TargetFamily = TargetFamily {
    name: "Qwen3",
    prefix: "Qwen3",
    model_types: &["qwen3"],
    classes: &["Qwen3ForCausalLM"],
    read,
    draft_config,
    refuse_windows: |_| None,
};

/// Reads the config of a Qwen3 model, or of a drafter built like one.
///
/// # Errors
/// As [`ModelConfig::load`].
fn read(fields: &Fields) -> Result<ModelConfig, ModelError> {
    fields.only_text("hidden_act", "silu")?;
    fields.only_off("attention_bias", "biases in attention are not supported")?;
    let size = |key: &str| fields.size(key).and_then(|value| fields.required(key, value));
    let (hidden_size, query) = (size("hidden_size")?, size("num_attention_heads")?);
    let key_value = fields.size("num_key_value_heads")?.unwrap_or(query);
    let dim = fields.size("head_dim")?.unwrap_or(hidden_size / query);
    let heads = fields.heads("num_key_value_heads", "head_dim", Heads { query, key_value, dim })?;
    let trained_for = fields.size("max_position_embeddings")?.unwrap_or(4096) as usize;
    let (rope, longest) = rope::flat(fields, dim, trained_for)?;
    let eps = fields.number("rms_norm_eps")?.unwrap_or(1e-6);
    let layer = LayerSpec {
        hidden_size,
        intermediate_size: size("intermediate_size")?,
        attention: AttentionSpec { heads, scale: (dim as f64).powf(-0.5), window: None },
        rope,
        value: Value::Projected,
        norms: Norms::Pre,
        qk_norm: true,
        eps,
        activation: Activation::Silu,
        scaled: false,
    };
    Ok(ModelConfig {
        family: &FAMILY,
        hidden_size,
        vocab_size: size("vocab_size")?,
        rms_norm_eps: eps,
        max_position_embeddings: longest,
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        initializer_range: fields.number("initializer_range")?.unwrap_or(0.02),
        embed_scale: 1.0,
        logit_softcap: None,
        layers: windows(fields)?
            .into_iter()
            .map(|window| LayerSpec {
                attention: AttentionSpec { window, ..layer.attention },
                ..layer.clone()
            })
            .collect(),
        raw: Map::new(),
    })
}

/// The window of every layer. Without `layer_types`, those from `max_window_layers` on have one.
fn windows(fields: &Fields) -> Result<Vec<Option<usize>>, ModelError> {
    let layers = fields.layers()?;
    if !fields.flag("use_sliding_window")?.unwrap_or(false) {
        return Ok(vec![None; layers]);
    }
    let window = fields.size("sliding_window")?;
    let window = fields.required("sliding_window", window)? as usize;
    let sliding = match sliding_layers(fields, layers)? {
        Some(sliding) => sliding,
        None => {
            let first = fields.count("max_window_layers")?.unwrap_or(28) as usize;
            (0..layers).map(|layer| layer >= first).collect()
        }
    };
    Ok(sliding.into_iter().map(|sliding| sliding.then_some(window)).collect())
}

fn draft_config(target: &Map<String, Json>, layers: &[LayerSpec]) -> Map<String, Json> {
    let mut map = target.clone();
    map.insert("model_type".into(), json!("qwen3"));
    let windows = layers.iter().any(|layer| layer.attention.window.is_some());
    map.insert("use_sliding_window".into(), json!(windows));
    draft::common(&mut map, layers);
    map
}
