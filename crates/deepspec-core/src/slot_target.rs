//! The token that each position of a draft block predicts.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which token slot k predicts: `anchor_predicts` anchor+1+k, `fill_in` anchor+k (its own position). Weights that were trained for one
/// convention draft nonsense with the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SlotTarget {
    /// The token at anchor + 1 + k: every slot drafts.
    #[default]
    AnchorPredicts,
    /// The token at anchor + k: slot 0 holds the anchor and drafts nothing (z-lab's convention).
    FillIn,
}

impl SlotTarget {
    /// The first block position that drafts.
    pub fn first_drafting_position(self) -> usize {
        match self {
            Self::AnchorPredicts => 0,
            Self::FillIn => 1,
        }
    }

    /// γ, the number of tokens drafted by a block of `block_size` positions.
    pub fn draft_len(self, block_size: usize) -> usize {
        block_size.saturating_sub(self.first_drafting_position())
    }

    /// Name of the convention in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Self::AnchorPredicts => "anchor_predicts",
            Self::FillIn => "fill_in",
        }
    }

    /// `FillIn` for `AnchorPredicts`, and `AnchorPredicts` for `FillIn`.
    pub fn other_convention(self) -> Self {
        match self {
            Self::AnchorPredicts => Self::FillIn,
            Self::FillIn => Self::AnchorPredicts,
        }
    }
}

impl fmt::Display for SlotTarget {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::AnchorPredicts => "slot k predicts anchor+1+k (all slots draft)",
            Self::FillIn => "slot k predicts anchor+k (slot 0 is idle; z-lab)",
        })
    }
}
