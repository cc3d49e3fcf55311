//! The drafter within a released DeepSeek-V4: its keys in the target's config, and the names of its tensors.

use std::path::Path;
use std::sync::Arc;

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Decoder, Drafter, EMBEDDING_LAYER_ID, Family, Fields, Tensors,
    json_map, read_layer_ids,
};
use deepspec_core::SlotTarget;
use serde_json::{Map, Value, json};

use super::settings::{DSparkV4Settings, StageSettings};
use crate::block_common::{BlockSpec, default_num_anchors};

/// Class of the target.
pub const CLASS: &str = "DeepseekV4ForCausalLM";
/// Number of stages of the released drafters, whose last one has the heads.
const STAGES: u64 = 3;
/// Prefixes of tensor names: DeepSeek's and this project's.
pub const RENAMES: &[(&str, &str)] = &[
    ("mtp.0.main_proj.", "fc."),
    ("mtp.0.main_norm.", "hidden_norm."),
    ("mtp.2.norm.", "norm."),
    ("mtp.2.hc_head_", "hc_head_"),
    ("mtp.2.markov_head.", "markov_head."),
    ("mtp.2.confidence_head.", "confidence_head."),
    ("embed.", "embed_tokens."),
    ("head.", "lm_head."),
    ("mtp.", "layers."),
];
/// Family whose keys describe the sizes of the decoder, which has no layers of that family.
const SIZES_LIKE: &str = "qwen3";

/// Reads the drafter from the config of its target.
///
/// # Errors
/// If a key is missing or wrong, or the drafter is DeepSeek-V4.1's.
pub fn read(
    fields: &Fields,
    tensors: &Tensors,
    families: &[Family],
) -> Result<(CheckpointFormat, Drafter), CheckpointError> {
    let block_size = fields.required_size::<u64>("dspark_block_size")?;
    refuse_v4_1(fields, tensors)?;
    let stages = count_stages(tensors)?;
    for (key, expected) in [("n_shared_experts", 1), ("n_group", 1), ("topk_group", 1)] {
        if let Some(found) = fields.size::<u64>(key)?.filter(|found| *found != expected) {
            return Err(fields.error(key, format!("{found} is not supported; expected {expected}")));
        }
    }
    for (key, problem) in [
        ("norm_topk_prob", "false is not supported: the weights of the chosen experts have a sum of 1"),
        ("enable_confidence_head", "false is not supported: the drafter has a confidence head"),
    ] {
        if fields.flag(key)? == Some(false) {
            return Err(fields.error(key, problem));
        }
    }
    fields.require_text_if_present("scoring_func", "sqrtsoftplus")?;
    let settings = DSparkV4Settings {
        blocks: BlockSpec {
            block_size: block_size as usize,
            slots: SlotTarget::AnchorPredicts,
            mask_token_id: fields.required("dspark_noise_token_id", fields.count("dspark_noise_token_id")?)?
                as i64,
            causal: false,
            num_anchors: default_num_anchors(),
        },
        markov_rank: fields.required_size("dspark_markov_rank")?,
        stages: stage_settings(fields)?,
    };
    let checked = settings.check_sizes(fields.required_size("vocab_size")?);
    checked.map_err(|(key, problem)| fields.error(key, problem))?;
    let path = Path::new(fields.path);
    let sizes = decoder_config(fields, stages)?;
    let inner = Fields::new(path, &sizes);
    let taps = read_layer_ids(fields, "dspark_target_layer_ids", EMBEDDING_LAYER_ID)?;
    let drafter =
        Decoder::read(&inner, &[], families)?.into_drafter(&inner, CLASS, taps, Arc::new(settings))?;
    let num_target_layers = Some(fields.required_size("num_hidden_layers")?);
    Ok((CheckpointFormat::DeepseekV4, Drafter { num_target_layers, ..drafter }))
}

/// Number of stages, by their tensors. `num_nextn_predict_layers` does not say it: it is 1 beside three stages.
fn count_stages(tensors: &Tensors) -> Result<u64, CheckpointError> {
    let norm = |stage: u64| format!("mtp.{stage}.attn_norm.weight");
    let stages = (0..=STAGES).take_while(|&stage| tensors.get(&norm(stage)).is_some()).count() as u64;
    if stages < STAGES {
        let problem =
            format!("missing: {stages} stages, but the heads are read from the last one of {STAGES}");
        return Err(tensors.error(&norm(stages), problem));
    }
    if stages > STAGES {
        let problem = format!("more stages than {STAGES}; the heads are read from the last one of {STAGES}");
        return Err(tensors.error(&norm(STAGES), problem));
    }
    Ok(stages)
}

/// Refuses the drafter of DeepSeek-V4.1, by the tensors that it has and lacks.
fn refuse_v4_1(fields: &Fields, tensors: &Tensors) -> Result<(), CheckpointError> {
    let signs = ["mtp.2.markov_head.embed.weight", "mtp.2.markov_head.head.weight"];
    let found = signs.into_iter().find(|name| tensors.get(name).is_some());
    let key = "dspark_n_routed_experts";
    if found.is_none() && !fields.map.contains_key(key) {
        return Ok(());
    }
    let problem = "DeepSeek-V4.1's drafter is not read: its hyper-connections sum streams later";
    Err(found.map_or_else(|| fields.error(key, problem), |name| tensors.error(name, problem)))
}

/// Sizes of the stages. Keys that have one value in all released configs may be absent.
fn stage_settings(fields: &Fields) -> Result<StageSettings, CheckpointError> {
    let usual = StageSettings::default();
    let number = |key: &str, usual: f64| Ok::<_, CheckpointError>(fields.number(key)?.unwrap_or(usual));
    Ok(StageSettings {
        num_attention_heads: fields.required_size("num_attention_heads")?,
        head_dim: fields.required_size("head_dim")?,
        qk_rope_head_dim: fields.required_size("qk_rope_head_dim")?,
        q_lora_rank: fields.required_size("q_lora_rank")?,
        o_lora_rank: fields.required_size("o_lora_rank")?,
        o_groups: fields.required_size("o_groups")?,
        sliding_window: fields.required_size("sliding_window")?,
        rope_theta: number("rope_theta", usual.rope_theta)?,
        rms_norm_eps: number("rms_norm_eps", usual.rms_norm_eps)?,
        n_routed_experts: fields.required_size("n_routed_experts")?,
        num_experts_per_tok: fields.required_size("num_experts_per_tok")?,
        moe_intermediate_size: fields.required_size("moe_intermediate_size")?,
        routed_scaling_factor: number("routed_scaling_factor", usual.routed_scaling_factor)?,
        swiglu_limit: match fields.map.get("swiglu_limit") {
            // No limit.
            Some(Value::Null) => 0.0,
            _ => number("swiglu_limit", usual.swiglu_limit)?,
        },
        hc_mult: fields.required_size("hc_mult")?,
        hc_sinkhorn_iters: fields.required_size::<u64>("hc_sinkhorn_iters")? as usize,
        hc_eps: number("hc_eps", usual.hc_eps)?,
    })
}

/// Sizes of the drafter as a config of [`SIZES_LIKE`].
fn decoder_config(fields: &Fields, stages: u64) -> Result<Map<String, Value>, CheckpointError> {
    let size = |key: &str| fields.required_size::<u64>(key).map(|size| json!(size));
    let mut map = json_map([
        ("model_type", json!(SIZES_LIKE)),
        ("hidden_size", size("hidden_size")?),
        ("vocab_size", size("vocab_size")?),
        ("num_hidden_layers", json!(stages)),
        ("num_attention_heads", size("num_attention_heads")?),
        ("num_key_value_heads", json!(1)),
        ("head_dim", size("head_dim")?),
        ("intermediate_size", size("moe_intermediate_size")?),
        (
            "rms_norm_eps",
            json!(fields.number("rms_norm_eps")?.unwrap_or(StageSettings::default().rms_norm_eps)),
        ),
        ("rope_theta", json!(fields.number("rope_theta")?.unwrap_or(StageSettings::default().rope_theta))),
        ("hidden_act", json!("silu")),
        ("attention_bias", json!(false)),
    ]);
    for key in ["max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"] {
        if let Some(value) = fields.map.get(key).filter(|value| !value.is_null()) {
            map.insert(key.into(), value.clone());
        }
    }
    Ok(map)
}
