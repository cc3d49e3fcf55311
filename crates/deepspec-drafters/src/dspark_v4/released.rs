//! The drafter within a DeepSeek-V4, as it is released and as engines load it: its keys in the target's config, and the names and
//! dtypes of its tensors.

use std::path::Path;
use std::sync::Arc;

use deepspec_checkpoint::{
    Checkpoint, CheckpointError, CheckpointFormat, Decoder, Drafter, EMBEDDING_LAYER_ID, Family, Fields,
    MergedTarget, StoredAs, Target, Tensors, json_map, merge_into_deepseek_v4, read_layer_ids,
};
use deepspec_core::cli::UsageError;
use deepspec_core::{SlotTarget, Tap};
use deepspec_models::ModelError;
use deepspec_models::config::read_json;
use serde_json::{Map, Value, json};

use super::settings::{DSparkV4Settings, StageSettings};
use crate::block_common::{BlockSpec, default_num_anchors};
use crate::draft_model::DrafterSettings as _;

/// Class of the target.
pub const CLASS: &str = "DeepseekV4ForCausalLM";
/// Number of stages of the released drafters, whose last one has the heads.
const STAGES: u64 = 3;
/// Prefix of the drafter's tensors.
const PREFIX: &str = "mtp.";
/// Keys of the target's config that describe the drafter.
const BLOCK_SIZE: &str = "dspark_block_size";
const NOISE_TOKEN: &str = "dspark_noise_token_id";
const TAPS: &str = "dspark_target_layer_ids";
const RANK: &str = "dspark_markov_rank";
/// Key of the target's layers.
const LAYERS: &str = "num_hidden_layers";
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
    (PREFIX, "layers."),
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
    let block_size = fields.required_size::<u64>(BLOCK_SIZE)?;
    refuse_v4_1(fields, tensors)?;
    let stages = count_stages(tensors)?;
    check_constants(fields)?;
    let settings = DSparkV4Settings {
        blocks: BlockSpec {
            block_size: block_size as usize,
            slots: SlotTarget::AnchorPredicts,
            mask_token_id: fields.required(NOISE_TOKEN, fields.count(NOISE_TOKEN)?)? as i64,
            causal: false,
            num_anchors: default_num_anchors(),
        },
        markov_rank: fields.required_size(RANK)?,
        stages: stage_settings(fields)?,
    };
    let checked = settings.check_sizes(fields.required_size("vocab_size")?);
    checked.map_err(|(key, problem)| fields.error(key, problem))?;
    let path = Path::new(fields.path);
    let sizes = decoder_config(fields, stages)?;
    let inner = Fields::new(path, &sizes);
    let taps = read_layer_ids(fields, TAPS, EMBEDDING_LAYER_ID)?;
    let drafter =
        Decoder::read(&inner, &[], families)?.into_drafter(&inner, CLASS, taps, Arc::new(settings))?;
    let num_target_layers = Some(fields.required_size(LAYERS)?);
    Ok((CheckpointFormat::DeepseekV4, Drafter { num_target_layers, ..drafter }))
}

/// Checks the keys that may have one value only.
fn check_constants(fields: &Fields) -> Result<(), CheckpointError> {
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
    fields.require_text_if_present("scoring_func", "sqrtsoftplus")
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

/// Plans a copy of the DeepSeek-V4 `target` with the drafter `source` in it, in the release's layout, which vLLM and SGLang load.
///
/// # Errors
/// If the target is another model, or its config describes other stages than the drafter has. Also as [`merge_into_deepseek_v4`].
pub fn merge<'a>(source: &'a Checkpoint, target: &Target) -> Result<MergedTarget<'a>, ModelError> {
    let misfit = |problem: String| ModelError::Mismatch(UsageError(problem));
    let drafter = source.drafter();
    if target.architectures() != [CLASS] {
        let problem = format!(
            "{} is not merged into {}; expected a target of the class {CLASS}",
            drafter.kind.title(),
            target.architectures().join(", ")
        );
        return Err(misfit(problem));
    }
    if drafter.layers != STAGES {
        let found = drafter.kind.layers_text(drafter);
        return Err(misfit(format!("the drafter has {found}; engines read {STAGES} from the target")));
    }
    if drafter.taps.contains(&Tap::Embedding) {
        let problem =
            "the drafter reads the embedding (layer id -1), and engines hand out states of layers only";
        return Err(misfit(problem.into()));
    }
    let (path, mut config) = read_json(target.dir())?;
    let (_, own) = drafter.kind.reference_config(drafter);
    let settings = DSparkV4Settings::read(&Fields::new(&path, &own))?;
    check_stages(&Fields::new(&path, &config), &settings.stages)?;
    config.extend(json_map([
        (BLOCK_SIZE, json!(settings.blocks.block_size)),
        (NOISE_TOKEN, json!(settings.blocks.mask_token_id)),
        (TAPS, json!(Tap::layer_ids(&drafter.taps))),
        (RANK, json!(settings.markov_rank)),
    ]));
    add_compress_ratios(&path, &mut config, target.layers())?;
    Ok(merge_into_deepseek_v4(source, target, PREFIX, config, stored_as)?)
}

/// Checks that engines build these stages from the target's config.
fn check_stages(fields: &Fields, stages: &StageSettings) -> Result<(), CheckpointError> {
    check_constants(fields)?;
    // vLLM counts the stages by this key, if it is there.
    let counted = "n_mtp_layers";
    if let Some(found) = fields.count(counted)?.filter(|&found| found != STAGES) {
        return Err(fields.error(counted, format!("{found}; the drafter has {STAGES} stages")));
    }
    // Without them, engines have other values than the drafter's reader.
    for key in ["routed_scaling_factor", "swiglu_limit"] {
        if !fields.map.contains_key(key) {
            return Err(fields.error(key, "missing; engines need it for the stages"));
        }
    }
    let (here, there) = (json!(stage_settings(fields)?), json!(stages));
    let differing = there.as_object().into_iter().flatten().find(|(key, value)| here[*key] != **value);
    match differing {
        None => Ok(()),
        Some((key, value)) => Err(fields.error(key, format!("{}, but the drafter has {value}", here[key]))),
    }
}

/// Replaces what is behind the layers in the list of their ratios by the stages, which compress nothing. A target that is released
/// without a DSpark has one entry there.
fn add_compress_ratios(
    path: &Path,
    config: &mut Map<String, Value>,
    layers: u64,
) -> Result<(), CheckpointError> {
    let key = "compress_ratios";
    let Some(Value::Array(ratios)) = config.get_mut(key) else { return Ok(()) };
    let (found, layers) = (ratios.len(), layers as usize);
    if found < layers {
        let problem = format!("{found} entries for {layers} layers");
        return Err(Fields::new(path, config).error(key, problem));
    }
    ratios.truncate(layers);
    ratios.resize(layers + STAGES as usize, json!(0));
    Ok(())
}

/// How the release stores a tensor.
fn stored_as(name: &str) -> StoredAs {
    let is_one_of = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    if is_one_of(&[".attn_sink", ".gate.bias", ".hc_"]) {
        StoredAs::Float32
    } else if is_one_of(&[".experts."]) {
        StoredAs::Float4
    } else if is_one_of(&[".attn.w", ".shared_experts.", ".main_proj."]) {
        StoredAs::Float8
    } else {
        StoredAs::Bfloat16
    }
}
