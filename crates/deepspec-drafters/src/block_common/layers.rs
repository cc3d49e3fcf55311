//! Which draft layers a recipe asks for.

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

/// Draft layers and their windows.
pub struct DraftLayers<'a> {
    /// How many there are.
    pub count: usize,
    /// Tokens that a layer with a window sees, itself included.
    pub sliding_window: Option<usize>,
    /// The kind of each; none means a window in all of them where there is one, and in none elsewhere.
    pub types: &'a [LayerType],
}

impl DraftLayers<'_> {
    /// The window of each; one too many where there are too many of them.
    pub fn windows(&self) -> Vec<Option<usize>> {
        let window = |layer| match self.types.get(layer) {
            Some(LayerType::FullAttention) => None,
            Some(LayerType::SlidingAttention) | None => self.sliding_window,
        };
        (0..self.count.min(MAX_LAYERS + 1)).map(window).collect()
    }

    /// Checks types and window against each other.
    ///
    /// # Errors
    /// A key and what is wrong with it.
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
