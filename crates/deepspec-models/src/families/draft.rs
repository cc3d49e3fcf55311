//! Decoders built like a target's, for drafters.

use deepspec_core::cli::UsageError;
use serde_json::{Map, Value, json};

use crate::config::{FULL_LAYER_TYPE, Family, SLIDING_LAYER_TYPE};
use crate::nn::{AttentionSpec, LayerSpec};
use crate::{ModelConfig, ModelError};

impl ModelConfig {
    /// Whether this target accepts drafters with layers of `family`: the target's family, or the family whose layers its block drafters
    /// have. Llama's and Qwen3's layers draft for each other's targets: most public Eagle3 drafters have Llama's.
    pub fn accepts_drafters_of(&self, family: Family) -> bool {
        self.family == family
            || self.family.anchored_family.is_some_and(|others| others == family)
            || self.family.decoder.pre_norm && family.decoder.pre_norm
    }

    /// The decoder of a block drafter, like [`ModelConfig::draft_decoder`]. If no inference engine runs block
    /// drafters of this family, the layers are those of another family, with equal sizes and rotary settings.
    ///
    /// # Errors
    /// As [`ModelConfig::draft_decoder`].
    pub fn anchored_decoder(&self, windows: &[Option<usize>]) -> Result<Self, ModelError> {
        let Some(family) = self.family.anchored_family else { return self.draft_decoder(windows) };
        let qk_norm = family.decoder.qk_norm;
        let layers = self.layers.iter().map(|own| LayerSpec { qk_norm, ..own.clone() }).collect();
        let mut decoder = Self { family, layers, ..self.clone() }.draft_decoder(windows)?;
        // Families have different defaults for missing keys, so the config of another family names them.
        if let Some(layer) = decoder.layers.first() {
            let heads = layer.attention.heads;
            decoder.raw.insert("head_dim".into(), json!(heads.dim));
            decoder.raw.insert("num_key_value_heads".into(), json!(heads.key_value));
        }
        Ok(decoder)
    }

    /// The decoder of a drafter for this target, one layer per entry of `windows`. Layers with a window are built like the target's
    /// sliding-window layers, and layers without one like its full-attention layers.
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
        if let Some(problem) = (self.family.refuse_windows)(windows) {
            return Err(misfit(problem));
        }
        let layer = |&window: &Option<usize>| {
            let like = |own: &&LayerSpec| own.attention.window.is_some() == window.is_some();
            // A target may have layers of one kind only. They are then the same with and without a window.
            let own = self.layers.iter().find(like).or(self.layers.first());
            let own = own.ok_or_else(|| misfit("the target has no layers"))?;
            Ok(LayerSpec { attention: AttentionSpec { window, ..own.attention }, ..own.clone() })
        };
        let layers = windows.iter().map(layer).collect::<Result<Vec<_>, ModelError>>()?;
        let raw = (self.family.draft_config)(&self.raw, &layers);
        Ok(Self { layers, raw, ..self.clone() })
    }
}

/// Sets `layer_types`, `num_hidden_layers` and `sliding_window`.
pub(super) fn set_layer_keys(map: &mut Map<String, Value>, layers: &[LayerSpec]) {
    let types = layers
        .iter()
        .map(|layer| if layer.attention.window.is_some() { SLIDING_LAYER_TYPE } else { FULL_LAYER_TYPE });
    map.insert("layer_types".into(), types.collect());
    map.insert("num_hidden_layers".into(), json!(layers.len()));
    if let Some(window) = layers.iter().find_map(|layer| layer.attention.window) {
        map.insert("sliding_window".into(), json!(window));
    }
}
