//! Qwen3.5 (dense text part): Gated DeltaNet in three of four layers, and gated attention in the others.

use deepspec_checkpoint::{DecoderFamily, Fields, OUTPUT_GATE_KEY};

use super::pre_norm::{self, PreNormSettings};
use super::{llama, qwen3, rope};
use crate::ModelError;
use crate::config::{DraftLayers, FULL_LAYER_TYPE, Family, ModelConfig, TargetFamily, layer_count};
use crate::nn::{GatedDeltaSpec, NormWeight};

/// The text part of Qwen3.5, dense.
pub(super) const FAMILY: TargetFamily = TargetFamily {
    decoder: &DECODER,
    classes: &["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"],
    read,
    fused: None,
    drafts: DRAFTS,
    // That of Qwen3.
    chat: None,
    shapes: &[("Qwen/Qwen3.5-4B", include_str!("../../../../configs/shapes/qwen3_5_4b.json"))],
};

/// Layers of drafters, also for Qwen3.5-MoE. Only MTP layers have gates and experts, and no drafter has linear attention.
pub(super) const DRAFTS: DraftLayers =
    DraftLayers::Other { blocks: &qwen3::FAMILY, tokens: &llama::FAMILY, own_mtp: true };

static DECODER: DecoderFamily = DecoderFamily {
    name: "Qwen3.5",
    prefix: "Qwen3_5",
    model_types: &["qwen3_5", "qwen3_5_text"],
    pre_norm: true,
    qk_norm: true,
    // Configs of drafters name all sizes.
    defaults: || vec![(OUTPUT_GATE_KEY, true.into())],
};

/// Entry of `layer_types` for a layer with Gated DeltaNet.
const LINEAR_LAYER_TYPE: &str = "linear_attention";
/// Default of `full_attention_interval`: every fourth layer has attention.
const FULL_LAYER_INTERVAL: usize = 4;
/// Default of `partial_rotary_factor`.
const ROTARY_PART: f64 = 0.25;
/// Largest size of a head or of the convolution, and number of heads. A larger one is a mistake in the config.
const MAX_SIZE: i64 = 4096;

/// Reads the config of a Qwen3.5 model: of the multimodal model, which has a `text_config`, or of the text part alone.
///
/// # Errors
/// As [`ModelConfig::load`].
fn read(outer: &Fields) -> Result<ModelConfig, ModelError> {
    let text = outer.object("text_config")?;
    let fields = text.as_ref().unwrap_or(outer);
    if fields.size::<u64>("num_experts")?.is_some() {
        let problem = "a mixture of experts; its `model_type` is \"qwen3_5_moe\" or \"qwen3_5_moe_text\"";
        return Err(fields.error("num_experts", problem).into());
    }
    read_hybrid(outer, fields, &FAMILY, None)
}

/// Reads a config of `family` whose layers mix as those of Qwen3.5: `fields` is the text part of `outer`. `intermediate_size` is that of
/// dense MLPs; None for the key.
///
/// # Errors
/// As [`ModelConfig::load`].
pub(super) fn read_hybrid(
    outer: &Fields,
    fields: &Fields,
    family: Family,
    intermediate_size: Option<i64>,
) -> Result<ModelConfig, ModelError> {
    // Transformers' defaults are 4 and 256, whatever the other sizes.
    for key in ["num_key_value_heads", "head_dim"] {
        fields.required_size::<u64>(key)?;
    }
    // The gate of linear attention's output.
    if let Some(other) = fields.text("output_gate_type")?.filter(|name| !["silu", "swish"].contains(name)) {
        let problem = format!("\"{other}\" is not supported; expected \"silu\" or \"swish\"");
        return Err(fields.error("output_gate_type", problem).into());
    }
    if fields.flag(OUTPUT_GATE_KEY)? == Some(false) {
        return Err(fields
            .error(OUTPUT_GATE_KEY, "attention without an output gate is not supported")
            .into());
    }
    let is_linear = linear_layers(fields)?;
    let spec = gated_delta(fields)?;
    let own = PreNormSettings {
        qk_norm: true,
        longest: 32_768,
        intermediate_size,
        ..PreNormSettings::new(family, vec![None; is_linear.len()])
    };
    let mut config = pre_norm::read(fields, own)?;
    let rotated = rotated_channels(fields, config.layers[0].rope.head_dim)?;
    for (layer, is_linear) in config.layers.iter_mut().zip(is_linear) {
        layer.gated_delta = is_linear.then_some(spec);
        layer.output_gate = true;
        layer.norm_weight = NormWeight::OnePlus;
        layer.rope.head_dim = rotated;
    }
    let tied = outer.flag("tie_word_embeddings")?;
    config.tie_word_embeddings = tied.unwrap_or(config.tie_word_embeddings);
    config.norm_weight = NormWeight::OnePlus;
    Ok(config)
}

/// Whether each layer has Gated DeltaNet.
fn linear_layers(fields: &Fields) -> Result<Vec<bool>, ModelError> {
    let layers = layer_count(fields)?;
    let Some(types) = fields.texts("layer_types")? else {
        let interval = fields.size::<u64>("full_attention_interval")?;
        let interval = interval.map_or(FULL_LAYER_INTERVAL, |interval| interval as usize);
        return Ok((1..=layers).map(|number| number % interval != 0).collect());
    };
    if types.len() != layers {
        let problem = format!("{} types for {layers} layers", types.len());
        return Err(fields.error("layer_types", problem).into());
    }
    let is_linear = |name: &&str| match *name {
        LINEAR_LAYER_TYPE => Ok(true),
        FULL_LAYER_TYPE => Ok(false),
        other => {
            let problem =
                format!("\"{other}\" is unknown; expected \"{LINEAR_LAYER_TYPE}\" or \"{FULL_LAYER_TYPE}\"");
            Err(fields.error("layer_types", problem).into())
        }
    };
    types.iter().map(is_linear).collect()
}

/// Sizes of Gated DeltaNet.
fn gated_delta(fields: &Fields) -> Result<GatedDeltaSpec, ModelError> {
    let size = |key: &str, default: i64| {
        let found = fields.size::<i64>(key)?.unwrap_or(default);
        if found <= MAX_SIZE {
            return Ok(found);
        }
        Err(ModelError::from(fields.error(key, format!("{found} is more than {MAX_SIZE}"))))
    };
    let spec = GatedDeltaSpec {
        key_heads: size("linear_num_key_heads", 16)?,
        value_heads: size("linear_num_value_heads", 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
        kernel: size("linear_conv_kernel_dim", 4)?,
    };
    if spec.value_heads % spec.key_heads != 0 {
        let problem = format!("{} is no multiple of the {} key heads", spec.value_heads, spec.key_heads);
        return Err(fields.error("linear_num_value_heads", problem).into());
    }
    Ok(spec)
}

/// Channels of a head that rotate. Multimodal rotary positions (`mrope_section`) are plain ones in text.
fn rotated_channels(fields: &Fields, head_dim: i64) -> Result<i64, ModelError> {
    let inside = match fields.object("rope_parameters")? {
        Some(settings) => settings.number("partial_rotary_factor")?,
        None => None,
    };
    let part = inside.or(fields.number("partial_rotary_factor")?).unwrap_or(ROTARY_PART);
    rope::rotated_channels(fields, part, head_dim)
}
