//! gpt-oss: experts with biases and clamped gates, attention sinks, and a window in every second layer.

use deepspec_checkpoint::{DecoderFamily, Fields};
use deepspec_text::{Channels, ChatFormat};

use super::pre_norm::{self, PreNormSettings};
use super::{QWEN3_OR_LLAMA, experts};
use crate::ModelError;
use crate::config::{ModelConfig, TargetFamily, layer_count, sliding_layers};
use crate::nn::{Activation, ExpertTensors, ExpertsSpec, RouterScores};

/// gpt-oss.
pub(super) const FAMILY: TargetFamily = TargetFamily {
    decoder: &DECODER,
    classes: &["GptOssForCausalLM"],
    read,
    fused: None,
    drafts: QWEN3_OR_LLAMA,
    // Harmony.
    chat: Some(ChatFormat {
        name: "harmony",
        assistant_header: "<|start|>assistant",
        end_of_turn: "<|return|>",
        default_system: None,
        assistant_prefix: None,
        channels: Some(Channels {
            end_of_message: "<|end|>",
            end_of_call: "<|call|>",
            answer_header: "<|channel|>final<|message|>",
        }),
    }),
    shapes: &[("openai/gpt-oss-20b", include_str!("../../../../configs/shapes/gpt_oss_20b.json"))],
};

static DECODER: DecoderFamily = DecoderFamily {
    name: "gpt-oss",
    prefix: "GptOss",
    model_types: &["gpt_oss"],
    pre_norm: true,
    qk_norm: false,
    // Drafters have no such layers.
    defaults: Vec::new,
};

/// Name of a layer's attention sinks.
const SINKS: &str = "sinks";
/// The limit of gates that the model's code has, whatever the config says.
const SWIGLU_LIMIT: f64 = 7.0;

/// Reads the config of a gpt-oss model.
///
/// # Errors
/// As [`ModelConfig::load`].
fn read(fields: &Fields) -> Result<ModelConfig, ModelError> {
    // Transformers' defaults are 8 and 64, whatever the other sizes.
    for key in ["num_key_value_heads", "head_dim"] {
        fields.required_size::<u64>(key)?;
    }
    if let Some(limit) = fields.number("swiglu_limit")?.filter(|limit| *limit != SWIGLU_LIMIT) {
        return Err(fields.error("swiglu_limit", format!("{limit} is not supported; expected 7")).into());
    }
    // Without both, transformers takes YaRN with a base of 150,000.
    let settings = [fields.object("rope_scaling")?, fields.object("rope_parameters")?];
    let settings: Vec<Fields> =
        settings.into_iter().flatten().filter(|settings| !settings.map.is_empty()).collect();
    if settings.is_empty() {
        return Err(fields.error("rope_scaling", "missing; expected the settings of YaRN").into());
    }
    let mut theta = fields.number("rope_theta")?;
    for settings in &settings {
        theta = theta.or(settings.number("rope_theta")?);
    }
    fields.required("rope_theta", theta)?;
    let layers = layer_count(fields)?;
    let window = fields.required_size::<i64>("sliding_window")? as usize;
    let sliding = match sliding_layers(fields, layers)? {
        Some(sliding) => sliding,
        None => (0..layers).map(|layer| layer % 2 == 0).collect(),
    };
    let windows = sliding.into_iter().map(|sliding| sliding.then_some(window)).collect();
    let has_bias = fields.flag("attention_bias")?.unwrap_or(true);
    let (count, active) = experts::read_counts(fields, ["num_local_experts", "num_experts"])?;
    let own = PreNormSettings {
        qkv_bias: has_bias,
        output_bias: has_bias,
        longest: 131_072,
        eps: 1e-5,
        ..PreNormSettings::new(&FAMILY, windows)
    };
    let mut config = pre_norm::read(fields, own)?;
    for layer in &mut config.layers {
        layer.activation = Activation::ClampedSwiglu;
        layer.attention.sinks = true;
        layer.sinks_name = SINKS;
        layer.experts = Some(ExpertsSpec {
            count,
            active,
            width: layer.intermediate_size,
            shared_width: None,
            scores: RouterScores::SoftmaxOfChosen,
            tensors: ExpertTensors::Interleaved,
        });
    }
    Ok(config)
}
