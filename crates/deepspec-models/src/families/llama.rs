//! Llama (dense): one kind of layer, without norms on queries and keys.

use deepspec_checkpoint::{DecoderFamily, Fields};
use deepspec_text::ChatFormat;
use serde_json::{Map, Value as Json, json};

use super::pre_norm::{self, PreNormSettings};
use super::{draft, qwen3};
use crate::ModelError;
use crate::config::{DraftLayers, ModelConfig, TargetFamily, layer_count};
use crate::nn::LayerSpec;

/// Llama 2 and 3, and models of their architecture.
pub(super) const FAMILY: TargetFamily = TargetFamily {
    decoder: &DECODER,
    classes: &["LlamaForCausalLM"],
    read,
    fused: None,
    drafts: DraftLayers::Own {
        config: draft_config,
        refuse_windows: |windows| {
            let any = windows.iter().any(Option::is_some);
            any.then_some("sliding_window: a Llama layer has no window; leave it out")
        },
        // Inference engines run block drafters only with norms on queries and keys.
        blocks: Some(&qwen3::FAMILY),
    },
    chat: Some(ChatFormat {
        name: "llama3",
        assistant_header: "<|start_header_id|>assistant<|end_header_id|>\n\n",
        end_of_turn: "<|eot_id|>",
        default_system: None,
        assistant_prefix: None,
        channels: None,
    }),
    shapes: &[],
};

static DECODER: DecoderFamily = DecoderFamily {
    name: "Llama",
    prefix: "Llama",
    model_types: &["llama"],
    pre_norm: true,
    qk_norm: false,
    defaults,
};

/// Defaults of transformers for missing keys.
fn defaults() -> Vec<(&'static str, Json)> {
    vec![
        ("vocab_size", json!(32_000)),
        ("hidden_size", json!(4096)),
        ("intermediate_size", json!(11_008)),
        ("num_hidden_layers", json!(32)),
        ("num_attention_heads", json!(32)),
        ("max_position_embeddings", json!(2048)),
        ("rms_norm_eps", json!(1e-6)),
    ]
}

/// Reads the config of a Llama model, or of a drafter built like one.
///
/// # Errors
/// As [`ModelConfig::load`].
fn read(fields: &Fields) -> Result<ModelConfig, ModelError> {
    fields.refuse_if_on("mlp_bias", "biases in the MLP are not supported")?;
    let windows = vec![None; layer_count(fields)?];
    pre_norm::read(fields, PreNormSettings { longest: 2048, ..PreNormSettings::new(&FAMILY, windows) })
}

fn draft_config(target: &Map<String, Json>, layers: &[LayerSpec]) -> Map<String, Json> {
    let mut map = target.clone();
    map.insert("model_type".into(), json!("llama"));
    draft::set_layer_keys(&mut map, layers);
    map
}
