//! Qwen3.5-MoE (text part): the layers of Qwen3.5, with a mixture of experts in place of every MLP. All rows have one
//! more expert.

use deepspec_checkpoint::{DecoderFamily, EXPERTS_KEY, Fields, OUTPUT_GATE_KEY};
use serde_json::{Value, json};

use super::{experts, qwen3_5};
use crate::ModelError;
use crate::config::{ModelConfig, TargetFamily};
use crate::nn::{ExpertTensors, ExpertsSpec, RouterScores};

/// The text part of Qwen3.5-MoE.
pub(super) const FAMILY: TargetFamily = TargetFamily {
    decoder: &DECODER,
    classes: &["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
    read,
    fused: None,
    drafts: qwen3_5::DRAFTS,
    // That of Qwen3.
    chat: None,
    shapes: &[("Qwen/Qwen3.5-35B-A3B", include_str!("../../../../configs/shapes/qwen3_5_35b_a3b.json"))],
};

static DECODER: DecoderFamily = DecoderFamily {
    name: "Qwen3.5-MoE",
    prefix: "Qwen3_5Moe",
    model_types: &["qwen3_5_moe", "qwen3_5_moe_text"],
    pre_norm: true,
    qk_norm: true,
    defaults,
};

/// Defaults of transformers for missing keys. They are the sizes of Qwen3.5-35B-A3B.
fn defaults() -> Vec<(&'static str, Value)> {
    vec![
        (OUTPUT_GATE_KEY, json!(true)),
        ("vocab_size", json!(248_320)),
        ("hidden_size", json!(2048)),
        ("num_hidden_layers", json!(40)),
        ("num_attention_heads", json!(16)),
        ("num_key_value_heads", json!(2)),
        ("head_dim", json!(256)),
        ("max_position_embeddings", json!(32_768)),
        ("rms_norm_eps", json!(1e-6)),
        (EXPERTS_KEY, json!(256)),
        ("num_experts_per_tok", json!(8)),
        ("moe_intermediate_size", json!(512)),
        ("shared_expert_intermediate_size", json!(512)),
    ]
}

/// Width inside a drafter's MLP over the hidden size, since configs name that of an expert only.
const MLP_RATIO: i64 = 3;

/// Reads the config of a Qwen3.5-MoE model: of the multimodal model, which has a `text_config`, or of the text part
/// alone.
///
/// # Errors
/// As [`ModelConfig::load`].
fn read(outer: &Fields) -> Result<ModelConfig, ModelError> {
    let text = outer.object("text_config")?;
    let fields = text.as_ref().unwrap_or(outer);
    let (count, active) = experts::read_counts(fields, [EXPERTS_KEY, "num_local_experts"])?;
    if fields.flag("norm_topk_prob")? == Some(false) {
        let problem = "false is not supported: the weights of a row's experts add up to 1";
        return Err(fields.error("norm_topk_prob", problem).into());
    }
    if fields.integers("mlp_only_layers")?.is_some_and(|layers| !layers.is_empty()) {
        return Err(fields.error("mlp_only_layers", "all layers have experts; expected []").into());
    }
    let spec = ExpertsSpec {
        count,
        active,
        width: fields.required_size("moe_intermediate_size")?,
        shared_width: Some(fields.required_size("shared_expert_intermediate_size")?),
        scores: RouterScores::SoftmaxOverAll { renormalise: true },
        tensors: ExpertTensors::EachOrStacked,
    };
    let hidden_size: i64 = fields.required_size("hidden_size")?;
    // A smaller width is that of an expert.
    let named = fields.size::<i64>("intermediate_size")?.filter(|&width| width >= hidden_size);
    let width = named.unwrap_or(MLP_RATIO * hidden_size);
    let mut config = qwen3_5::read_hybrid(outer, fields, &FAMILY, Some(width))?;
    for layer in &mut config.layers {
        layer.experts = Some(spec);
    }
    Ok(config)
}
