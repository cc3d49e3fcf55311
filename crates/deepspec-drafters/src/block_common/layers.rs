//! Number, attention types and windows of the draft layers of a recipe.

use deepspec_models::config::MAX_LAYERS;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ConfigIssue;

/// Attention kind of a draft layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LayerType {
    /// Full attention to all tokens.
    FullAttention,
    /// Attention to the last tokens only.
    SlidingAttention,
}

/// Settings of the draft layers in a recipe.
pub struct DraftLayers<'a> {
    /// Number of layers.
    pub count: usize,
    /// Tokens that a sliding layer attends to, including the token itself.
    pub sliding_window: Option<usize>,
    /// Attention type of each layer. If empty, all layers slide when `sliding_window` is set, and none slides otherwise.
    pub types: &'a [LayerType],
}

impl DraftLayers<'_> {
    /// Sliding window of each layer. The list has at most `MAX_LAYERS` + 1 entries, so that a later check refuses too many layers.
    pub fn windows(&self) -> Vec<Option<usize>> {
        let window = |layer| match self.types.get(layer) {
            Some(LayerType::FullAttention) => None,
            Some(LayerType::SlidingAttention) | None => self.sliding_window,
        };
        (0..self.count.min(MAX_LAYERS + 1)).map(window).collect()
    }

    /// Checks that `types` and `sliding_window` agree.
    pub fn check(&self) -> Result<(), ConfigIssue> {
        let (layers, types) = (self.count, self.types.len());
        if types > 0 && types != layers {
            return Err(("layer_types", format!("{types} types for {layers} draft layers")));
        }
        let slides = self.types.contains(&LayerType::SlidingAttention);
        match self.sliding_window {
            None if slides => Err(("sliding_window", "missing, though a layer is sliding_attention".into())),
            Some(_) if types > 0 && !slides => {
                Err(("sliding_window", "no layer is sliding_attention; leave it out".into()))
            }
            _ => Ok(()),
        }
    }
}
