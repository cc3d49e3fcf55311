//! Common parts of Qwen3, Llama and families like them: equal layers with norms before attention and MLP, and one
//! rotary embedding.

use deepspec_checkpoint::{ATTENTION_SINK_BIAS, Fields, read_attention_sinks};
use serde_json::{Map, Value};

use super::{Family, rope};
use crate::ModelError;
use crate::config::{FULL_LAYER_TYPE, ModelConfig, checked_heads};
use crate::nn::{Activation, AttentionSpec, Heads, LayerSpec, NormPlacement, NormWeight, ValueSource};

/// Refuses keys that would change the model. A null, and layers that all have full attention, change nothing.
///
/// # Errors
/// Names the first key that is set, with `problem`.
pub(super) fn refuse_keys(fields: &Fields, keys: &[&str], problem: &str) -> Result<(), ModelError> {
    let is_plain = |value: &Value| {
        let types = value.as_array().filter(|types| !types.is_empty());
        value.is_null() || types.is_some_and(|types| types.iter().all(|kind| kind == FULL_LAYER_TYPE))
    };
    match keys.iter().find(|key| fields.map.get(**key).is_some_and(|value| !is_plain(value))) {
        Some(key) => Err(fields.error(key, problem).into()),
        None => Ok(()),
    }
}

/// Settings in which the pre-norm families differ.
pub(super) struct PreNormSettings {
    /// The family.
    pub family: Family,
    /// Whether queries and keys are RMS-normed per head.
    pub qk_norm: bool,
    /// Whether the projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the projection of attention's output has a bias.
    pub output_bias: bool,
    /// Width inside dense MLPs; None for the key `intermediate_size`.
    pub intermediate_size: Option<i64>,
    /// Default of `max_position_embeddings`.
    pub longest: usize,
    /// Default of `rms_norm_eps`.
    pub eps: f64,
    /// The window of each layer.
    pub windows: Vec<Option<usize>>,
    /// Factor on attention scores; None for `head_dim^-0.5`.
    pub attention_scale: Option<f64>,
    /// Factor on the outputs of attention and MLP.
    pub residual_scale: f64,
    /// Factor on embeddings.
    pub embed_scale: f64,
    /// Factor on logits.
    pub logit_scale: f64,
}

impl PreNormSettings {
    /// Layers without biases, head norms and multipliers.
    pub fn new(family: Family, windows: Vec<Option<usize>>) -> Self {
        Self {
            family,
            qk_norm: false,
            qkv_bias: false,
            output_bias: false,
            intermediate_size: None,
            longest: 4096,
            eps: 1e-6,
            windows,
            attention_scale: None,
            residual_scale: 1.0,
            embed_scale: 1.0,
            logit_scale: 1.0,
        }
    }
}

/// Reads the config of a model with such layers.
///
/// # Errors
/// As [`ModelConfig::load`].
pub(super) fn read(fields: &Fields, differences: PreNormSettings) -> Result<ModelConfig, ModelError> {
    let PreNormSettings { family, qk_norm, qkv_bias, longest, windows, .. } = differences;
    fields.require_text_if_present("hidden_act", "silu")?;
    if !differences.output_bias {
        fields.refuse_if_on("attention_bias", "biases in attention are not supported")?;
    }
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
    let eps = fields.number("rms_norm_eps")?.unwrap_or(differences.eps);
    let intermediate_size = differences.intermediate_size.map_or_else(|| size("intermediate_size"), Ok)?;
    let scale = differences.attention_scale.unwrap_or((dim as f64).powf(-0.5));
    let sinks = read_attention_sinks(fields)?;
    let layer = |window| LayerSpec {
        hidden_size,
        intermediate_size,
        experts: None,
        gated_delta: None,
        output_gate: false,
        attention: AttentionSpec { heads, scale, window, sinks },
        rope,
        value: ValueSource::Projected,
        norms: NormPlacement::Pre,
        qk_norm,
        qkv_bias,
        output_bias: differences.output_bias,
        sinks_name: ATTENTION_SINK_BIAS,
        norm_weight: NormWeight::Plain,
        residual_scale: differences.residual_scale,
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
        norm_weight: NormWeight::Plain,
        embed_scale: differences.embed_scale,
        logit_scale: differences.logit_scale,
        logit_softcap: None,
        has_forward: true,
        layers: windows.into_iter().map(layer).collect(),
        raw: Map::new(),
    })
}
