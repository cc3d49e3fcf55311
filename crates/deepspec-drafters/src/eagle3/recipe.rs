//! The recipe of an Eagle3 drafter.

use deepspec_core::recipe::{LossNormalization, at_least_one};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An Eagle3 drafter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Eagle3Recipe {
    /// Decoder layers of the drafter.
    pub num_draft_layers: usize,
    /// Steps of the training-time test, and drafted tokens per block.
    pub ttt_length: usize,
    /// The loss of step s weighs this to the power of s.
    pub step_loss_decay: f64,
    /// Which predictions are trained.
    pub supervise: Supervise,
}

impl Default for Eagle3Recipe {
    fn default() -> Self {
        Self { num_draft_layers: 1, ttt_length: 7, step_loss_decay: 0.8, supervise: Supervise::Shifted }
    }
}

/// Which predictions of Eagle3 are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Supervise {
    /// Those two places behind a supervised token, as the reference has it: the first two tokens of an answer are not
    /// trained, and the two behind its end are.
    Shifted,
    /// Those of supervised tokens.
    Labels,
}

/// How an Eagle3 drafter is trained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Eagle3Objective {
    /// Which predictions are trained.
    pub supervise: Supervise,
    /// The loss of step s weighs this to the power of s.
    pub step_loss_decay: f64,
    /// Whether a sequence is averaged over its own length, or over the longest one's of the micro-batch as the reference
    /// does.
    pub normalization: LossNormalization,
}

impl Eagle3Recipe {
    /// Checks values against their ranges.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        at_least_one(&[("num_draft_layers", self.num_draft_layers), ("ttt_length", self.ttt_length)])?;
        if self.step_loss_decay.is_nan() || self.step_loss_decay <= 0.0 || self.step_loss_decay > 1.0 {
            let problem = format!("{} is not in (0, 1]", self.step_loss_decay);
            return Err(("step_loss_decay", problem));
        }
        Ok(())
    }
}
