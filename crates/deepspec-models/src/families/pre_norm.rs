//! Common parts of Qwen3 and Llama: equal layers with norms before attention and MLP, and one rotary embedding.

use deepspec_checkpoint::Fields;
use serde_json::Map;

use super::{Family, rope};
use crate::ModelError;
use crate::config::{ModelConfig, checked_heads};
use crate::nn::{Activation, AttentionSpec, Heads, LayerSpec, NormPlacement, ValueSource};

/// Settings in which the pre-norm families differ.
pub(super) struct PreNormSettings {
    /// The family.
    pub family: Family,
    /// Whether queries and keys are RMS-normed per head.
    pub qk_norm: bool,
    /// Default of `max_position_embeddings`.
    pub longest: usize,
    /// The window of each layer.
    pub windows: Vec<Option<usize>>,
}

/// Reads the config of a Qwen3 or Llama model.
///
/// # Errors
/// As [`ModelConfig::load`].
pub(super) fn read(fields: &Fields, differences: PreNormSettings) -> Result<ModelConfig, ModelError> {
    let PreNormSettings { family, qk_norm, longest, windows } = differences;
    fields.require_text_if_present("hidden_act", "silu")?;
    fields.refuse_if_on("attention_bias", "biases in attention are not supported")?;
    let size = |key: &str| fields.size(key).and_then(|value| fields.required(key, value));
    let (hidden_size, query) = (size("hidden_size")?, size("num_attention_heads")?);
    let key_value = fields.size("num_key_value_heads")?.unwrap_or(query);
    let dim = match fields.size("head_dim")? {
        Some(dim) => dim,
        None if hidden_size % query == 0 => hidden_size / query,
        None => {
            let problem =
                format!("{query} does not divide the hidden size {hidden_size}, and there is no head_dim");
            return Err(fields.error("num_attention_heads", problem).into());
        }
    };
    let heads = checked_heads(fields, "num_key_value_heads", "head_dim", Heads { query, key_value, dim })?;
    let trained_for =
        fields.size::<i64>("max_position_embeddings")?.map_or(longest, |longest| longest as usize);
    let (rope, longest) = rope::shared_rope(fields, dim, trained_for)?;
    let eps = fields.number("rms_norm_eps")?.unwrap_or(1e-6);
    let intermediate_size = size("intermediate_size")?;
    let layer = |window| LayerSpec {
        hidden_size,
        intermediate_size,
        attention: AttentionSpec { heads, scale: (dim as f64).powf(-0.5), window },
        rope,
        value: ValueSource::Projected,
        norms: NormPlacement::Pre,
        qk_norm,
        eps,
        activation: Activation::Silu,
        scaled: false,
    };
    Ok(ModelConfig {
        family,
        hidden_size,
        vocab_size: size("vocab_size")?,
        rms_norm_eps: eps,
        max_position_embeddings: longest,
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        initializer_range: fields.number("initializer_range")?.unwrap_or(0.02),
        embed_scale: 1.0,
        logit_softcap: None,
        has_forward: true,
        layers: windows.into_iter().map(layer).collect(),
        raw: Map::new(),
    })
}
