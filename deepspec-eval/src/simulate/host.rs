//! What a server takes beside the steps that a cost curve knows.

use serde::Serialize;

/// Parts of a [`Host`].
pub const PARTS: usize = 4;

/// What the seconds of replayed steps become on a server.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Host {
    /// Multiplies the cost curve's seconds.
    pub factor: f64,
    /// Seconds more of each step.
    pub step: f64,
    /// Seconds more of each step where the schedule weighs costs.
    pub choice: f64,
    /// Seconds more of each token that is sent.
    pub token: f64,
}

impl Host {
    /// One that adds nothing but what scheduling takes, in seconds.
    pub fn scheduling(choice: f64) -> Self {
        Self { factor: 1.0, step: 0.0, choice, token: 0.0 }
    }

    /// Seconds of so many of the cost curve, steps, choices and tokens.
    pub fn seconds(&self, parts: [f64; PARTS]) -> f64 {
        [self.factor, self.step, self.choice, self.token]
            .iter()
            .zip(parts)
            .map(|(each, part)| each * part)
            .sum()
    }
}
