//! Stages of a pipeline, and amounts of work.

use std::fmt;
use std::ops::{Add, Mul};

use serde::{Deserialize, Serialize};

/// A stage of the pipeline from prompts to an evaluated drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The target answers the prompts (`regenerate`).
    Answers,
    /// The target's hidden states are captured (`cache build`, or during training).
    States,
    /// The drafter is trained on the hidden states (`deepspec-train`).
    Training,
    /// The drafter's accepted length is measured (`deepspec-eval run`).
    Evaluation,
}

impl Stage {
    /// All stages in the order in which they run.
    pub const ALL: [Self; 4] = [Self::Answers, Self::States, Self::Training, Self::Evaluation];
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Answers => "answers",
            Self::States => "states",
            Self::Training => "training",
            Self::Evaluation => "evaluation",
        })
    }
}

/// An amount of work.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Work {
    /// Floating-point operations: two per multiply-add of the architectures' matrix products,
    /// without masked attention.
    #[serde(default)]
    pub operations: f64,
    /// Bytes read from or written to memory.
    #[serde(default)]
    pub bytes: f64,
    /// Number of passes through all layers: forwards, micro-batches, or decoding steps.
    #[serde(default)]
    pub passes: f64,
}

impl Work {
    /// `[operations, bytes, passes]`.
    pub(crate) fn to_array(self) -> [f64; 3] {
        [self.operations, self.bytes, self.passes]
    }

    /// The first invalid value: its key, the value, and the expected range.
    pub fn describe_invalid_value(&self) -> Option<String> {
        let named = [("operations", self.operations), ("bytes", self.bytes), ("passes", self.passes)];
        if let Some((key, value)) = named.iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
            return Some(format!("`{key}` is {value}; expected a number of at least 0"));
        }
        (self.to_array() == [0.0; 3]).then(|| "has no `operations`, `bytes` or `passes`".into())
    }
}

impl Add for Work {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            operations: self.operations + other.operations,
            bytes: self.bytes + other.bytes,
            passes: self.passes + other.passes,
        }
    }
}

impl Mul<f64> for Work {
    type Output = Self;

    fn mul(self, times: f64) -> Self {
        Self { operations: self.operations * times, bytes: self.bytes * times, passes: self.passes * times }
    }
}
