//! A server's overhead on top of the steps of a cost curve.

use deepspec_cost::policy::Policy;
use serde::Serialize;

/// Number of parts of a [`HostOverhead`].
pub const HOST_PARTS: usize = 4;

/// A server's overhead, as a linear model of its time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct HostOverhead {
    /// Factor on the cost curve's seconds.
    pub factor: f64,
    /// Additional seconds per step.
    pub step: f64,
    /// Additional seconds per step of schedules that weigh costs.
    pub choice: f64,
    /// Additional seconds per token sent.
    pub token: f64,
}

impl HostOverhead {
    /// A host whose only overhead is the scheduling time `choice`, in seconds per step.
    pub fn scheduling_only(choice: f64) -> Self {
        Self { factor: 1.0, step: 0.0, choice, token: 0.0 }
    }

    /// Time of a step of `seconds` as the engine's planner measures it. Sending tokens is not part
    /// of it.
    pub fn step_seconds(&self, seconds: f64, policy: Policy) -> f64 {
        self.factor * seconds + self.step + if policy.reads_cost() { self.choice } else { 0.0 }
    }

    /// Seconds for the given amounts: seconds of the cost curve, steps, choices and tokens.
    pub fn seconds(&self, parts: [f64; HOST_PARTS]) -> f64 {
        [self.factor, self.step, self.choice, self.token]
            .iter()
            .zip(parts)
            .map(|(each, part)| each * part)
            .sum()
    }
}
