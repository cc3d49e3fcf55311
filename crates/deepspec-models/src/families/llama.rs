//! Llama (dense): one kind of layer, without norms on queries and keys.

use serde_json::{Map, Value as Json, json};

use super::{TargetFamily, draft, rope};
use crate::ModelError;
use crate::config::{Fields, ModelConfig};
use crate::nn::{Activation, AttentionSpec, Heads, LayerSpec, Norms, Value};

/// Llama 2 and 3, and what is built like them.
pub(super) const FAMILY: TargetFamily = TargetFamily {
    name: "Llama",
    prefix: "Llama",
    model_types: &["llama"],
    classes: &["LlamaForCausalLM"],
    read,
    draft_config,
    refuse_windows: |windows| {
        let any = windows.iter().any(Option::is_some);
        any.then_some("sliding_window: a Llama layer has no window; leave it out")
    },
};

/// Reads the config of a Llama model, or of a drafter built like one.
///
/// # Errors
/// As [`ModelConfig::load`].
fn read(fields: &Fields) -> Result<ModelConfig, ModelError> {
    fields.only_text("hidden_act", "silu")?;
    fields.only_off("attention_bias", "biases in attention are not supported")?;
    fields.only_off("mlp_bias", "biases in the MLP are not supported")?;
    let size = |key: &str| fields.size(key).and_then(|value| fields.required(key, value));
    let (hidden_size, query) = (size("hidden_size")?, size("num_attention_heads")?);
    let key_value = fields.size("num_key_value_heads")?.unwrap_or(query);
    let dim = match fields.size("head_dim")? {
        Some(dim) => dim,
        None if hidden_size % query == 0 => hidden_size / query,
        None => {
            let problem =
                format!("{query} does not divide the hidden size {hidden_size}, and there is no head_dim");
            return Err(fields.error("num_attention_heads", problem));
        }
    };
    let heads = fields.heads("num_key_value_heads", "head_dim", Heads { query, key_value, dim })?;
    let trained_for = fields.size("max_position_embeddings")?.unwrap_or(2048) as usize;
    let (rope, longest) = rope::flat(fields, dim, trained_for)?;
    let eps = fields.number("rms_norm_eps")?.unwrap_or(1e-6);
    let layer = LayerSpec {
        hidden_size,
        intermediate_size: size("intermediate_size")?,
        attention: AttentionSpec { heads, scale: (dim as f64).powf(-0.5), window: None },
        rope,
        value: Value::Projected,
        norms: Norms::Pre,
        qk_norm: false,
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
        layers: vec![layer; fields.layers()?],
        raw: Map::new(),
    })
}

fn draft_config(target: &Map<String, Json>, layers: &[LayerSpec]) -> Map<String, Json> {
    let mut map = target.clone();
    map.insert("model_type".into(), json!("llama"));
    draft::common(&mut map, layers);
    map
}
