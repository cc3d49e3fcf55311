//! Granite (dense): the layers of Llama, with multipliers on embeddings, attention scores, branches and logits.

use deepspec_checkpoint::{DecoderFamily, Fields};
use deepspec_text::ChatFormat;

use super::QWEN3_OR_LLAMA;
use super::pre_norm::{self, PreNormSettings, refuse_keys};
use crate::ModelError;
use crate::config::{ModelConfig, TargetFamily, layer_count};

/// Granite 3, dense.
pub(super) const FAMILY: TargetFamily = TargetFamily {
    decoder: &DECODER,
    classes: &["GraniteForCausalLM"],
    read,
    fused: None,
    drafts: QWEN3_OR_LLAMA,
    chat: Some(ChatFormat {
        name: "granite",
        assistant_header: "<|start_of_role|>assistant<|end_of_role|>",
        end_of_turn: "<|end_of_text|>",
        default_system: None,
        assistant_prefix: None,
        channels: None,
    }),
    shapes: &[],
};

static DECODER: DecoderFamily = DecoderFamily {
    name: "Granite",
    prefix: "Granite",
    model_types: &["granite"],
    pre_norm: true,
    qk_norm: false,
    // Drafters have no such layers.
    defaults: Vec::new,
};

/// Reads the config of a Granite model.
///
/// # Errors
/// As [`ModelConfig::load`].
fn read(fields: &Fields) -> Result<ModelConfig, ModelError> {
    fields.refuse_if_on("mlp_bias", "biases in the MLP are not supported")?;
    refuse_keys(
        fields,
        &["layer_types", "sliding_window", "layer_rope_theta", "attention_sinks"],
        "a Granite model has one kind of layer here, which sees all tokens",
    )?;
    let multiplier = |key: &str| {
        let value = fields.number(key)?.unwrap_or(1.0);
        if value > 0.0 && value.is_finite() {
            return Ok(value);
        }
        Err(fields.error(key, format!("{value} is not a positive number")))
    };
    let windows = vec![None; layer_count(fields)?];
    let own = PreNormSettings {
        longest: 2048,
        attention_scale: Some(multiplier("attention_multiplier")?),
        residual_scale: multiplier("residual_multiplier")?,
        embed_scale: multiplier("embedding_multiplier")?,
        logit_scale: 1.0 / multiplier("logits_scaling")?,
        ..PreNormSettings::new(&FAMILY, windows)
    };
    pre_norm::read(fields, own)
}
