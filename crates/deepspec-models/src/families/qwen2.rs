//! Qwen2 and Qwen2.5 (dense): the layers of Llama, with biases on queries, keys and values.

use deepspec_checkpoint::{DecoderFamily, Fields};
use deepspec_text::ChatFormat;

use super::pre_norm::{self, PreNormSettings, refuse_keys};
use super::{QWEN3_OR_LLAMA, qwen3};
use crate::ModelError;
use crate::config::{ModelConfig, TargetFamily};

/// Qwen2 and Qwen2.5, dense.
pub(super) const FAMILY: TargetFamily = TargetFamily {
    decoder: &DECODER,
    classes: &["Qwen2ForCausalLM"],
    read,
    fused: None,
    drafts: QWEN3_OR_LLAMA,
    // The marks of `qwen`. The template writes its own system message.
    chat: Some(ChatFormat {
        name: "qwen2.5",
        assistant_header: "<|im_start|>assistant\n",
        end_of_turn: "<|im_end|>\n",
        default_system: None,
        assistant_prefix: None,
        channels: None,
    }),
    shapes: &[],
};

static DECODER: DecoderFamily = DecoderFamily {
    name: "Qwen2.5",
    prefix: "Qwen2",
    model_types: &["qwen2"],
    pre_norm: true,
    qk_norm: false,
    // Drafters have no such layers.
    defaults: Vec::new,
};

/// Reads the config of a Qwen2 or Qwen2.5 model.
///
/// # Errors
/// As [`ModelConfig::load`].
fn read(fields: &Fields) -> Result<ModelConfig, ModelError> {
    // Transformers' default is 32, whatever the number of query heads.
    fields.required_size::<u64>("num_key_value_heads")?;
    refuse_keys(fields, &["dual_chunk_attention_config"], "attention in two chunks is not supported")?;
    let windows = qwen3::layer_windows(fields)?;
    let own = PreNormSettings { qkv_bias: true, longest: 32_768, ..PreNormSettings::new(&FAMILY, windows) };
    pre_norm::read(fields, own)
}
