//! Mistral (dense): the layers of Llama, all of them with a sliding window or none.

use deepspec_checkpoint::{DecoderFamily, Fields};
use deepspec_text::ChatFormat;

use super::QWEN3_OR_LLAMA;
use super::pre_norm::{self, PreNormSettings};
use crate::ModelError;
use crate::config::{ModelConfig, TargetFamily, layer_count};

/// Mistral, dense, without a vision part.
pub(super) const FAMILY: TargetFamily = TargetFamily {
    decoder: &DECODER,
    classes: &["MistralForCausalLM"],
    read,
    fused: None,
    drafts: QWEN3_OR_LLAMA,
    chat: Some(ChatFormat {
        name: "mistral",
        assistant_header: "[/INST]",
        end_of_turn: "</s>",
        default_system: None,
        assistant_prefix: None,
        channels: None,
    }),
    shapes: &[],
};

static DECODER: DecoderFamily = DecoderFamily {
    name: "Mistral",
    prefix: "Mistral",
    model_types: &["mistral"],
    pre_norm: true,
    qk_norm: false,
    // Drafters have no such layers.
    defaults: Vec::new,
};

/// The window of a config without `sliding_window`.
const DEFAULT_WINDOW: usize = 4096;

/// Reads the config of a Mistral model.
///
/// # Errors
/// As [`ModelConfig::load`].
fn read(fields: &Fields) -> Result<ModelConfig, ModelError> {
    // Transformers' default is 8, whatever the number of query heads.
    fields.required_size::<u64>("num_key_value_heads")?;
    if fields.map.get("layer_types").is_some_and(|types| !types.is_null()) {
        let problem =
            "a Mistral model has one kind of layer; models of several kinds have another model_type";
        return Err(fields.error("layer_types", problem).into());
    }
    let window = match fields.map.get("sliding_window") {
        None => Some(DEFAULT_WINDOW),
        Some(_) => fields.size::<i64>("sliding_window")?.map(|window| window as usize),
    };
    let windows = vec![window; layer_count(fields)?];
    pre_norm::read(fields, PreNormSettings { longest: 131_072, ..PreNormSettings::new(&FAMILY, windows) })
}
