//! What a server takes beside the steps that a cost curve knows.

use deepspec_cost::policy::Policy;
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

    /// What the engine sees a step take that costs so many `seconds`: it sends its tokens behind it.
    pub fn step_seconds(&self, seconds: f64, policy: Policy) -> f64 {
        self.factor * seconds + self.step + if policy.reads_cost() { self.choice } else { 0.0 }
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
