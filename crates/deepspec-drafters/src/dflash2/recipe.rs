//! The recipe of a DFlash 2 drafter.

use deepspec_core::Slots;
use deepspec_core::recipe::at_least_one;
use deepspec_ops::distill_loss::LossRecipe;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ConfigIssue;
use crate::block_common::{DraftLayers, LayerType, num_anchors};

/// A DFlash 2 drafter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DFlash2Recipe {
    /// B, slots of a block; all but the first draft.
    pub block_size: usize,
    /// Decoder layers of the drafter.
    pub num_draft_layers: usize,
    /// Tokens that a draft layer with a window sees, itself included. The layers without one see everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// The kind of each draft layer; absent means a window in all of them where there is one, and in none elsewhere.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layer_types: Vec<LayerType>,
    /// A token that never occurs in text; stands for what is to be predicted.
    pub mask_token_id: i64,
    /// Blocks per training sequence.
    #[serde(default = "num_anchors")]
    pub num_anchors: usize,
    /// The convolutions.
    #[serde(default)]
    pub convolution: Convolution,
    /// The selector.
    #[serde(default)]
    pub selector: Selector,
    /// Weights of the losses of all logits; absent means the label's cross entropy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<LossRecipe>,
}

/// The convolutions along the slots of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Convolution {
    /// K: a slot and the K − 1 before it.
    pub kernel_size: i64,
    /// c, channels that share what is added to their coefficients.
    pub group_size: i64,
}

impl Default for Convolution {
    fn default() -> Self {
        Self { kernel_size: 2, group_size: 16 }
    }
}

/// The selector of a path over candidates.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Selector {
    /// r.
    pub rank: i64,
    /// k, candidates of each slot.
    pub top_k: i64,
    /// Weight of its loss.
    pub alpha: f64,
}

impl Default for Selector {
    fn default() -> Self {
        Self { rank: 256, top_k: 16, alpha: 1.0 }
    }
}

impl DFlash2Recipe {
    /// Its draft layers.
    pub fn layers(&self) -> DraftLayers<'_> {
        let Self { num_draft_layers: count, sliding_window, layer_types: types, .. } = self;
        DraftLayers { count: *count, sliding_window: *sliding_window, types }
    }

    /// Weights of the losses of all logits.
    pub fn loss(&self) -> LossRecipe {
        self.loss.unwrap_or(LossRecipe { ce_alpha: 1.0, ..LossRecipe::NONE })
    }

    /// Checks values against their ranges and each other.
    ///
    /// # Errors
    /// A key and what is wrong with it.
    pub fn check(&self) -> Result<(), ConfigIssue> {
        at_least_one(&[
            ("num_draft_layers", self.num_draft_layers),
            ("num_anchors", self.num_anchors),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ])?;
        self.layers().check()?;
        if Slots::FillIn.drafted(self.block_size) == 0 {
            return Err(("block_size", "must be at least 2: the first slot drafts nothing".into()));
        }
        if !self.selector.alpha.is_finite() || self.selector.alpha < 0.0 {
            return Err(("selector.alpha", "must be a number from 0".into()));
        }
        Ok(())
    }
}
