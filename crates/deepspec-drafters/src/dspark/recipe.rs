//! The recipe of a block drafter.

use deepspec_core::Slots;
use deepspec_core::recipe::at_least_one;
use deepspec_ops::distill_loss::LossRecipe;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ConfigIssue;
use crate::block_common::{DraftLayers, LayerType, num_anchors};

/// A block drafter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlockRecipe {
    /// B, slots of a block. All of them draft, or with `slots: fill_in` all but the first.
    pub block_size: usize,
    /// What the slots predict.
    #[serde(default)]
    pub slots: Slots,
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
    /// The Markov head; absent means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub markov: Option<Markov>,
    /// The confidence head; absent means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confidence: Option<ConfidenceRecipe>,
    /// Weights of the losses; absent means the algorithm's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<LossRecipe>,
}

/// How the bias on the logits depends on the previous token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MarkovKind {
    /// `W2 e`.
    Vanilla,
    /// `W2 (σ(G[h; e] + b) ⊙ e)`.
    Gated,
    /// `W2 tanh(o)` of a gated recurrent state.
    Rnn,
}

impl MarkovKind {
    /// The kind of this name in config files.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn parse(name: &str) -> Result<Self, String> {
        let found = [Self::Vanilla, Self::Gated, Self::Rnn].into_iter().find(|kind| kind.name() == name);
        found.ok_or_else(|| format!("\"{name}\" is unknown; expected vanilla, gated or rnn"))
    }

    /// Its name in config files.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Vanilla => "vanilla",
            Self::Gated => "gated",
            Self::Rnn => "rnn",
        }
    }
}

/// The Markov head: a low-rank correction of the logits by the previous token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Markov {
    /// Its form.
    #[serde(rename = "type")]
    pub kind: MarkovKind,
    /// r, its rank.
    pub rank: i64,
}

/// The confidence head.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConfidenceRecipe {
    /// Whether it also reads the previous token's Markov embedding.
    pub with_markov: bool,
    /// Weight of its loss.
    #[serde(default = "one")]
    pub alpha: f64,
}

fn one() -> f64 {
    1.0
}

impl BlockRecipe {
    /// Its draft layers.
    pub fn layers(&self) -> DraftLayers<'_> {
        let Self { num_draft_layers: count, sliding_window, layer_types: types, .. } = self;
        DraftLayers { count: *count, sliding_window: *sliding_window, types }
    }

    /// Checks values against their ranges and each other.
    pub fn check(&self) -> Result<(), ConfigIssue> {
        at_least_one(&[
            ("block_size", self.block_size),
            ("num_draft_layers", self.num_draft_layers),
            ("num_anchors", self.num_anchors),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ])?;
        self.layers().check()?;
        if self.slots.drafted(self.block_size) == 0 {
            return Err((
                "block_size",
                "must be at least 2: the first slot of fill_in drafts nothing".into(),
            ));
        }
        if self.confidence.is_some_and(|confidence| confidence.with_markov) && self.markov.is_none() {
            return Err(("confidence.with_markov", "there is no Markov head to read from".into()));
        }
        if self.confidence.is_some_and(|confidence| !confidence.alpha.is_finite() || confidence.alpha < 0.0) {
            return Err(("confidence.alpha", "must be a number from 0".into()));
        }
        if self.markov.is_some_and(|markov| markov.rank < 1) {
            return Err(("markov.rank", "must be at least 1; leave `markov` out for no head".into()));
        }
        Ok(())
    }
}
