//! Qwen3 (dense): one kind of layer, with or without a sliding window.

use deepspec_checkpoint::{DecoderFamily, Fields};
use deepspec_text::ChatFormat;
use serde_json::{Map, Value as Json, json};

use super::draft;
use super::pre_norm::{self, PreNormSettings};
use crate::ModelError;
use crate::config::{DraftLayers, ModelConfig, TargetFamily, layer_count, sliding_layers};
use crate::nn::LayerSpec;

/// Qwen3, dense.
pub(super) const FAMILY: TargetFamily = TargetFamily {
    decoder: &DECODER,
    classes: &["Qwen3ForCausalLM"],
    read,
    fused: None,
    drafts: DraftLayers::Own { config: draft_config, refuse_windows: |_| None, blocks: None },
    chat: Some(ChatFormat {
        name: "qwen",
        assistant_header: "<|im_start|>assistant\n",
        end_of_turn: "<|im_end|>\n",
        default_system: Some("You are a helpful assistant."),
        assistant_prefix: None,
        channels: None,
    }),
    shapes: &[
        ("Qwen/Qwen3-4B", include_str!("../../../../configs/shapes/qwen3_4b.json")),
        ("Qwen/Qwen3-8B", include_str!("../../../../configs/shapes/qwen3_8b.json")),
        ("Qwen/Qwen3-14B", include_str!("../../../../configs/shapes/qwen3_14b.json")),
    ],
};

static DECODER: DecoderFamily = DecoderFamily {
    name: "Qwen3",
    prefix: "Qwen3",
    model_types: &["qwen3"],
    pre_norm: true,
    qk_norm: true,
    defaults,
};

/// Defaults of transformers for missing keys.
fn defaults() -> Vec<(&'static str, Json)> {
    vec![
        ("vocab_size", json!(151_936)),
        ("hidden_size", json!(4096)),
        ("intermediate_size", json!(22_016)),
        ("num_hidden_layers", json!(32)),
        ("num_attention_heads", json!(32)),
        ("num_key_value_heads", json!(32)),
        ("head_dim", json!(128)),
        ("max_position_embeddings", json!(32_768)),
        ("rms_norm_eps", json!(1e-6)),
    ]
}

/// Reads the config of a Qwen3 model, or of a drafter built like one.
///
/// # Errors
/// As [`ModelConfig::load`].
fn read(fields: &Fields) -> Result<ModelConfig, ModelError> {
    let windows = layer_windows(fields)?;
    let own = PreNormSettings { qk_norm: true, longest: 4096, ..PreNormSettings::new(&FAMILY, windows) };
    pre_norm::read(fields, own)
}

/// The window of every layer. Without `layer_types`, the layers from `max_window_layers` on have a
/// window.
pub(super) fn layer_windows(fields: &Fields) -> Result<Vec<Option<usize>>, ModelError> {
    let layers = layer_count(fields)?;
    if !fields.flag("use_sliding_window")?.unwrap_or(false) {
        return Ok(vec![None; layers]);
    }
    let window = fields.size::<i64>("sliding_window")?;
    let window = fields.required("sliding_window", window)? as usize;
    let sliding = match sliding_layers(fields, layers)? {
        Some(sliding) => sliding,
        None => {
            let first = fields.count("max_window_layers")?.unwrap_or(28) as usize;
            (0..layers).map(|layer| layer >= first).collect()
        }
    };
    Ok(sliding.into_iter().map(|sliding| sliding.then_some(window)).collect())
}

fn draft_config(target: &Map<String, Json>, layers: &[LayerSpec]) -> Map<String, Json> {
    let mut map = target.clone();
    map.insert("model_type".into(), json!("qwen3"));
    let windows = layers.iter().any(|layer| layer.attention.window.is_some());
    map.insert("use_sliding_window".into(), json!(windows));
    draft::set_layer_keys(&mut map, layers);
    map
}
