//! Decoders built like a target's, for drafters.

use deepspec_core::cli::UsageError;
use serde_json::{Map, Value, json};

use super::{FULL, Family, SLIDING};
use crate::nn::{AttentionSpec, LayerSpec, Value as Values};
use crate::{ModelConfig, ModelError};

impl ModelConfig {
    /// The decoder of a drafter for this target, one layer per entry of `windows`: built like the target's layers that see
    /// everything, or, where a window is given, like those that have one.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] for layers that the target's family cannot have.
    pub fn draft_decoder(&self, windows: &[Option<usize>]) -> Result<Self, ModelError> {
        let misfit = |problem: &str| ModelError::Mismatch(UsageError(problem.into()));
        let mut sizes = windows.iter().flatten();
        if let Some(first) = sizes.next()
            && sizes.any(|window| window != first)
        {
            return Err(misfit("draft layers with windows must share one size"));
        }
        if self.family == Family::Gemma4 && windows.last().is_some_and(Option::is_some) {
            return Err(misfit(
                "layer_types: the last layer of a Gemma 4 model has no window; make the last one full_attention",
            ));
        }
        let layer = |&window: &Option<usize>| {
            let like = |own: &&LayerSpec| own.attention.window.is_some() == window.is_some();
            // A Qwen3 layer is the same with and without a window; both kinds of Gemma 4's are in every target.
            let own = self.layers.iter().find(like).or(self.layers.first());
            let own = own.ok_or_else(|| misfit("the target has no layers"))?;
            Ok(LayerSpec { attention: AttentionSpec { window, ..own.attention }, ..own.clone() })
        };
        let layers = windows.iter().map(layer).collect::<Result<Vec<_>, ModelError>>()?;
        let raw = match self.family {
            Family::Qwen3 => qwen3(self.raw.clone(), &layers),
            Family::Gemma4 => gemma4(&self.raw, &layers),
        };
        Ok(Self { layers, raw, ..self.clone() })
    }
}

fn common(map: &mut Map<String, Value>, layers: &[LayerSpec]) {
    let types = layers.iter().map(|layer| if layer.attention.window.is_some() { SLIDING } else { FULL });
    map.insert("layer_types".into(), types.collect());
    map.insert("num_hidden_layers".into(), json!(layers.len()));
    if let Some(window) = layers.iter().find_map(|layer| layer.attention.window) {
        map.insert("sliding_window".into(), json!(window));
    }
}

fn qwen3(mut map: Map<String, Value>, layers: &[LayerSpec]) -> Map<String, Value> {
    map.insert("model_type".into(), json!("qwen3"));
    let windows = layers.iter().any(|layer| layer.attention.window.is_some());
    map.insert("use_sliding_window".into(), json!(windows));
    common(&mut map, layers);
    map
}

/// The text part's settings with every choice spelled out that depends on the kind of Gemma 4 model around it.
fn gemma4(target: &Map<String, Value>, layers: &[LayerSpec]) -> Map<String, Value> {
    let text = target.get("text_config").and_then(Value::as_object).unwrap_or(target);
    let mut map = text.clone();
    let types = [("target_model_type", target), ("target_text_model_type", text)];
    for (key, from) in types {
        if let Some(model_type) = from.get("model_type") {
            map.insert(key.into(), model_type.clone());
        }
    }
    map.remove("per_layer_config");
    map.insert("model_type".into(), json!("gemma4_text"));
    map.insert("enable_moe_block".into(), json!(false));
    map.insert("hidden_size_per_layer_input".into(), json!(0));
    map.insert("num_kv_shared_layers".into(), json!(0));
    for LayerSpec { attention, value, .. } in layers {
        let heads = attention.heads;
        let (dim, key_value) = match (attention.window, value) {
            (None, Values::SharesKey) => ("global_head_dim", "num_global_key_value_heads"),
            (None, _) => ("global_head_dim", "num_key_value_heads"),
            (Some(_), _) => ("head_dim", "num_key_value_heads"),
        };
        map.insert(dim.into(), json!(heads.dim));
        map.insert(key_value.into(), json!(heads.key_value));
    }
    common(&mut map, layers);
    map
}
