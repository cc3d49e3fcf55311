//! Qwen3-MoE: the attention of Qwen3, with a mixture of experts in place of the MLP of all or some layers.

use deepspec_checkpoint::{DecoderFamily, Fields};

use super::pre_norm::{self, PreNormSettings, refuse_keys};
use super::{QWEN3_OR_LLAMA, experts};
use crate::ModelError;
use crate::config::{ModelConfig, TargetFamily, layer_count};
use crate::nn::{ExpertTensors, ExpertsSpec, RouterScores};

/// Qwen3-MoE.
pub(super) const FAMILY: TargetFamily = TargetFamily {
    decoder: &DECODER,
    classes: &["Qwen3MoeForCausalLM"],
    read,
    fused: None,
    // Drafters are dense.
    drafts: QWEN3_OR_LLAMA,
    // That of Qwen3.
    chat: None,
    shapes: &[("Qwen/Qwen3-30B-A3B", include_str!("../../../../configs/shapes/qwen3_30b_a3b.json"))],
};

static DECODER: DecoderFamily = DecoderFamily {
    name: "Qwen3-MoE",
    prefix: "Qwen3Moe",
    model_types: &["qwen3_moe"],
    pre_norm: true,
    qk_norm: true,
    // Drafters have no such layers.
    defaults: Vec::new,
};

/// The window of a config with `use_sliding_window` and without the key `sliding_window`.
const DEFAULT_WINDOW: usize = 4096;

/// Reads the config of a Qwen3-MoE model.
///
/// # Errors
/// As [`ModelConfig::load`].
fn read(fields: &Fields) -> Result<ModelConfig, ModelError> {
    // Transformers' default is 4, whatever the number of query heads.
    fields.required_size::<u64>("num_key_value_heads")?;
    refuse_keys(fields, &["layer_types"], "a Qwen3-MoE model has one kind of attention")?;
    let layers = layer_count(fields)?;
    // All layers have the window; transformers does not read `max_window_layers` here.
    let window = match fields.map.get("sliding_window") {
        _ if !fields.flag("use_sliding_window")?.unwrap_or(false) => None,
        None => Some(DEFAULT_WINDOW),
        Some(_) => fields.size::<i64>("sliding_window")?.map(|window| window as usize),
    };
    let experts = read_experts(fields)?;
    let has_experts = layers_with_experts(fields, layers)?;
    let windows = vec![window; layers];
    let own = PreNormSettings { qk_norm: true, longest: 32_768, ..PreNormSettings::new(&FAMILY, windows) };
    let mut config = pre_norm::read(fields, own)?;
    for (layer, has_experts) in config.layers.iter_mut().zip(has_experts) {
        layer.experts = has_experts.then_some(experts);
    }
    Ok(config)
}

/// Sizes of the experts. Newer versions of transformers write `num_local_experts`.
fn read_experts(fields: &Fields) -> Result<ExpertsSpec, ModelError> {
    let (count, active) = experts::read_counts(fields, ["num_experts", "num_local_experts"])?;
    let renormalise = fields.flag("norm_topk_prob")?.unwrap_or(false);
    Ok(ExpertsSpec {
        count,
        active,
        width: fields.required_size("moe_intermediate_size")?,
        shared_width: None,
        scores: RouterScores::SoftmaxOverAll { renormalise },
        tensors: ExpertTensors::EachOrStacked,
    })
}

/// Whether each layer has experts. Every `decoder_sparse_step`-th layer has them, except `mlp_only_layers`.
fn layers_with_experts(fields: &Fields, layers: usize) -> Result<Vec<bool>, ModelError> {
    let step = fields.size::<u64>("decoder_sparse_step")?.unwrap_or(1);
    let key = "mlp_only_layers";
    let dense = fields.integers(key)?.unwrap_or_default();
    if let Some(layer) = dense.iter().find(|layer| !(0..layers as i64).contains(layer)) {
        return Err(fields.error(key, format!("{layer} is none of {layers} layers, from 0")).into());
    }
    let has_experts = |layer: u64| (layer + 1).is_multiple_of(step) && !dense.contains(&(layer as i64));
    Ok((0..layers as u64).map(has_experts).collect())
}
