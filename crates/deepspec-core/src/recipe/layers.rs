//! The layers of a block drafter, and what its recipe's types cannot rule out.

use serde::{Deserialize, Serialize};

use super::BlockRecipe;
use super::validate::at_least_one;

/// What a draft layer sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerType {
    /// Everything.
    FullAttention,
    /// The last tokens.
    SlidingAttention,
}

impl BlockRecipe {
    /// The window of each draft layer.
    pub fn windows(&self) -> impl Iterator<Item = Option<usize>> {
        (0..self.num_draft_layers).map(|layer| match self.layer_types.get(layer) {
            Some(LayerType::FullAttention) => None,
            Some(LayerType::SlidingAttention) | None => self.sliding_window,
        })
    }

    /// Checks values against their ranges and each other.
    pub(super) fn check(&self) -> Result<(), (&'static str, String)> {
        at_least_one(&[
            ("drafter.block_size", self.block_size),
            ("drafter.num_draft_layers", self.num_draft_layers),
            ("drafter.num_anchors", self.num_anchors),
            ("drafter.sliding_window", self.sliding_window.unwrap_or(1)),
        ])?;
        let (layers, types) = (self.num_draft_layers, self.layer_types.len());
        if types > 0 && types != layers {
            return Err(("drafter.layer_types", format!("{types} types for {layers} draft layers")));
        }
        let slides = self.layer_types.contains(&LayerType::SlidingAttention);
        match self.sliding_window {
            None if slides => {
                return Err((
                    "drafter.sliding_window",
                    "missing, though a layer is sliding_attention".into(),
                ));
            }
            Some(_) if types > 0 && !slides => {
                return Err(("drafter.sliding_window", "no layer is sliding_attention; leave it out".into()));
            }
            _ => {}
        }
        if self.confidence.is_some_and(|confidence| confidence.with_markov) && self.markov.is_none() {
            return Err((
                "drafter.dspark.confidence.with_markov",
                "there is no Markov head to read from".into(),
            ));
        }
        if self.confidence.is_some_and(|confidence| !confidence.alpha.is_finite() || confidence.alpha < 0.0) {
            return Err(("drafter.dspark.confidence.alpha", "must be a number from 0".into()));
        }
        if self.markov.is_some_and(|markov| markov.rank < 1) {
            return Err((
                "drafter.dspark.markov.rank",
                "must be at least 1; leave `markov` out for no head".into(),
            ));
        }
        Ok(())
    }
}
