//! Qwen3 (dense): one kind of layer, with or without a sliding window.

use serde_json::{Map, Value as Json, json};

use super::draft;
use super::pre_norm::{self, Differences};
use crate::ModelError;
use crate::config::{Fields, ModelConfig};
use crate::config::{TargetFamily, sliding_layers};
use crate::nn::LayerSpec;

/// Qwen3, dense.
pub(super) const FAMILY: TargetFamily = TargetFamily {
    decoder: &deepspec_dialects::QWEN3,
    classes: &["Qwen3ForCausalLM"],
    read,
    draft_config,
    behind_anchors: None,
    refuse_windows: |_| None,
};

/// Reads the config of a Qwen3 model, or of a drafter built like one.
///
/// # Errors
/// As [`ModelConfig::load`].
fn read(fields: &Fields) -> Result<ModelConfig, ModelError> {
    let differences =
        Differences { family: &FAMILY, qk_norm: true, longest: 4096, windows: windows(fields)? };
    pre_norm::read(fields, differences)
}

/// The window of every layer. Without `layer_types`, those from `max_window_layers` on have one.
fn windows(fields: &Fields) -> Result<Vec<Option<usize>>, ModelError> {
    let layers = fields.layers()?;
    if !fields.flag("use_sliding_window")?.unwrap_or(false) {
        return Ok(vec![None; layers]);
    }
    let window = fields.size("sliding_window")?;
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
    draft::common(&mut map, layers);
    map
}
