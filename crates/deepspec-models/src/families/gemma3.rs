//! Gemma 3 (dense text part). Norms multiply by 1 + w. Every sixth layer has full attention, the others a sliding window
//! and rotary embeddings of their own.

use deepspec_checkpoint::{ATTENTION_SINK_BIAS, DecoderFamily, Fields};
use deepspec_text::ChatFormat;

use super::{QWEN3_OR_LLAMA, rope};
use crate::ModelError;
use crate::config::{ModelConfig, TargetFamily, checked_heads, layer_count, sliding_layers};
use crate::nn::{Activation, AttentionSpec, Heads, LayerSpec, NormPlacement, NormWeight, ValueSource};

/// The text part of Gemma 3, dense.
pub(super) const FAMILY: TargetFamily = TargetFamily {
    decoder: &DECODER,
    classes: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
    read,
    fused: None,
    drafts: QWEN3_OR_LLAMA,
    chat: Some(ChatFormat {
        name: "gemma3",
        assistant_header: "<start_of_turn>model\n",
        end_of_turn: "<end_of_turn>\n",
        default_system: None,
        assistant_prefix: None,
        channels: None,
    }),
    shapes: &[],
};

static DECODER: DecoderFamily = DecoderFamily {
    name: "Gemma 3",
    prefix: "Gemma3",
    model_types: &["gemma3", "gemma3_text"],
    pre_norm: false,
    qk_norm: true,
    // Drafters have no such layers.
    defaults: Vec::new,
};

/// Reads the config of a Gemma 3 model: of the multimodal model, which has a `text_config`, or of the text part alone.
/// Published configs leave out many keys, so that the defaults are those of transformers.
///
/// # Errors
/// As [`ModelConfig::load`].
fn read(outer: &Fields) -> Result<ModelConfig, ModelError> {
    let text = outer.object("text_config")?;
    let fields = text.as_ref().unwrap_or(outer);
    refuse_unsupported(fields)?;
    let size = |key: &str, default: i64| fields.size(key).map(|value| value.unwrap_or(default));
    let heads = Heads {
        query: size("num_attention_heads", 8)?,
        key_value: size("num_key_value_heads", 4)?,
        dim: size("head_dim", 256)?,
    };
    let heads = checked_heads(fields, "num_key_value_heads", "head_dim", heads)?;
    let (hidden_size, intermediate_size) = (size("hidden_size", 2304)?, size("intermediate_size", 9216)?);
    let window = size("sliding_window", 4096)? as usize;
    let trained_for = size("max_position_embeddings", 131_072)? as usize;
    let eps = fields.number("rms_norm_eps")?.unwrap_or(1e-6);
    let scalar = fields.number("query_pre_attn_scalar")?.unwrap_or(256.0);
    if !(scalar > 0.0 && scalar.is_finite()) {
        return Err(fields
            .error("query_pre_attn_scalar", format!("{scalar} is not a positive number"))
            .into());
    }
    let ropes = rope::RopeByLayerType::of_gemma3(fields, trained_for)?;
    let (full, local) = (ropes.full(heads.dim)?, ropes.sliding(heads.dim)?);
    let layer = |sliding: bool| LayerSpec {
        hidden_size,
        intermediate_size,
        experts: None,
        gated_delta: None,
        output_gate: false,
        attention: AttentionSpec {
            heads,
            scale: scalar.powf(-0.5),
            window: sliding.then_some(window),
            sinks: false,
        },
        rope: if sliding { local } else { full },
        value: ValueSource::Projected,
        norms: NormPlacement::Sandwich,
        qk_norm: true,
        qkv_bias: false,
        output_bias: false,
        sinks_name: ATTENTION_SINK_BIAS,
        norm_weight: NormWeight::OnePlus,
        residual_scale: 1.0,
        eps,
        activation: Activation::GeluTanh,
        scaled: false,
    };
    let tied = match outer.flag("tie_word_embeddings")? {
        Some(tied) => tied,
        None => fields.flag("tie_word_embeddings")?.unwrap_or(true),
    };
    Ok(ModelConfig {
        family: &FAMILY,
        hidden_size,
        vocab_size: size("vocab_size", 262_208)?,
        rms_norm_eps: eps,
        max_position_embeddings: trained_for,
        tie_word_embeddings: tied,
        initializer_range: fields.number("initializer_range")?.unwrap_or(0.02),
        norm_weight: NormWeight::OnePlus,
        embed_scale: (hidden_size as f64).sqrt(),
        logit_scale: 1.0,
        logit_softcap: None,
        has_forward: true,
        layers: layers_with_windows(fields)?.into_iter().map(layer).collect(),
        raw: serde_json::Map::new(),
    })
}

/// Whether each layer has a window: by `layer_types`, or all but every n-th by `sliding_window_pattern`.
fn layers_with_windows(fields: &Fields) -> Result<Vec<bool>, ModelError> {
    let layers = if fields.map.contains_key("num_hidden_layers") { layer_count(fields)? } else { 26 };
    if let Some(sliding) = sliding_layers(fields, layers)? {
        return Ok(sliding);
    }
    let interval = fields.size::<u64>("sliding_window_pattern")?.unwrap_or(6) as usize;
    Ok((1..=layers).map(|number| number % interval != 0).collect())
}

/// Refuses features of other models of this type that are not supported.
fn refuse_unsupported(fields: &Fields) -> Result<(), ModelError> {
    fields.require_text_if_present("hidden_activation", "gelu_pytorch_tanh")?;
    fields.refuse_if_on("attention_bias", "biases in attention are not supported")?;
    fields.refuse_if_on("use_bidirectional_attention", "attention to later tokens is not supported")?;
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(cap) = fields.number(key)? {
            let problem = format!("{cap}: soft-caps of a Gemma 3 model are not supported; expected null");
            return Err(fields.error(key, problem).into());
        }
    }
    Ok(())
}
