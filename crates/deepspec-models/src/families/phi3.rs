//! Phi-4 and Phi-3 (dense): the layers of Llama, stored with fused projections. A part of each head may rotate.

use deepspec_checkpoint::{DecoderFamily, Fields};
use deepspec_text::ChatFormat;

use super::pre_norm::{self, PreNormSettings, refuse_keys};
use super::{QWEN3_OR_LLAMA, rope};
use crate::ModelError;
use crate::config::{ModelConfig, TargetFamily, layer_count};
use crate::nn::{Heads, LayerSpec, RopeSpec, Scaling};
use crate::weights::{FusedTensor, Part};

/// Phi-4 and Phi-3, dense.
pub(super) const FAMILY: TargetFamily = TargetFamily {
    decoder: &DECODER,
    classes: &["Phi3ForCausalLM"],
    read,
    fused: Some(fused_projections),
    drafts: QWEN3_OR_LLAMA,
    chat: Some(ChatFormat {
        name: "phi4",
        assistant_header: "<|im_start|>assistant<|im_sep|>",
        end_of_turn: "<|im_end|>",
        default_system: None,
        assistant_prefix: None,
        channels: None,
    }),
    shapes: &[],
};

static DECODER: DecoderFamily = DecoderFamily {
    name: "Phi-4",
    prefix: "Phi3",
    model_types: &["phi3"],
    pre_norm: true,
    qk_norm: false,
    // Drafters have no such layers.
    defaults: Vec::new,
};

/// Reads the config of a Phi-4 or Phi-3 model.
///
/// # Errors
/// As [`ModelConfig::load`].
fn read(fields: &Fields) -> Result<ModelConfig, ModelError> {
    refuse_keys(fields, &["layer_types"], "a Phi model has one kind of layer here")?;
    let (scaling, newer) = (fields.object("rope_scaling")?, fields.object("rope_parameters")?);
    let (key, settings) = match &scaling {
        Some(settings) => ("rope_scaling", Some(settings)),
        None => ("rope_parameters", newer.as_ref()),
    };
    let (kind, inside) = match settings {
        Some(settings) => {
            let kind = settings.text("rope_type")?.or(settings.text("type")?);
            (kind, settings.number("partial_rotary_factor")?)
        }
        None => (None, None),
    };
    if let Some(kind) = kind.filter(|&kind| kind != "default") {
        let problem = format!(
            "\"{kind}\" (LongRoPE in this family) is not supported; expected \"default\"; vLLM can compute the states \
             (data.states: {{server: URL}})"
        );
        return Err(fields.error(key, problem).into());
    }
    let part = inside.or(fields.number("partial_rotary_factor")?).unwrap_or(1.0);
    let window = fields.size::<i64>("sliding_window")?.map(|window| window as usize);
    let windows = vec![window; layer_count(fields)?];
    let own = PreNormSettings { eps: 1e-5, ..PreNormSettings::new(&FAMILY, windows) };
    let mut config = pre_norm::read(fields, own)?;
    for layer in &mut config.layers {
        layer.rope = partial_rope(fields, layer.rope, part)?;
    }
    Ok(config)
}

/// Rotary embedding of the first `part · D` channels of a head. The frequencies are `θ^(−2i/(part·D))`, which are those of
/// a whole head with the base `θ^(1/part)`.
fn partial_rope(fields: &Fields, whole: RopeSpec, part: f64) -> Result<RopeSpec, ModelError> {
    let rotated = rope::rotated_channels(fields, part, whole.head_dim)?;
    if rotated == whole.head_dim {
        return Ok(whole);
    }
    let theta = whole.theta.powf(whole.head_dim as f64 / rotated as f64);
    Ok(RopeSpec { theta, scaling: Scaling::Proportional { planes: rotated / 2, factor: 1.0 }, ..whole })
}

/// The fused projections of a layer. Rows of queries and keys are sorted so that channel i of a head rotates with
/// channel `i + D/2`.
fn fused_projections(layer: &LayerSpec) -> Vec<FusedTensor> {
    let Heads { query, key_value, dim } = layer.attention.heads;
    let sorted = match layer.rope.scaling {
        Scaling::Proportional { planes, .. } => Some(rotated_rows(dim, planes)),
        _ => None,
    };
    let part = |name: &'static str, rows: i64, head_rows: Option<&Vec<i64>>| Part {
        name,
        rows,
        block_order: head_rows.cloned(),
    };
    vec![
        FusedTensor {
            name: "self_attn.qkv_proj.weight",
            parts: vec![
                part("self_attn.q_proj.weight", query * dim, sorted.as_ref()),
                part("self_attn.k_proj.weight", key_value * dim, sorted.as_ref()),
                part("self_attn.v_proj.weight", key_value * dim, None),
            ],
        },
        FusedTensor {
            name: "mlp.gate_up_proj.weight",
            parts: ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
                .map(|name| part(name, layer.intermediate_size, None))
                .into(),
        },
    ]
}

/// Order of a head's rows in which its first `2·planes` rows, whose halves rotate with each other, are split over both
/// halves of the head.
fn rotated_rows(dim: i64, planes: i64) -> Vec<i64> {
    let rest = dim / 2 - planes;
    let (first, second) = (0..planes, planes..2 * planes);
    let (passed, others) = (2 * planes..2 * planes + rest, 2 * planes + rest..dim);
    first.chain(passed).chain(second).chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotated_channels_are_half_a_head_apart() {
        assert_eq!(rotated_rows(8, 2), [0, 1, 4, 5, 2, 3, 6, 7]);
        assert_eq!(rotated_rows(4, 2), [0, 1, 2, 3]);
    }
}
