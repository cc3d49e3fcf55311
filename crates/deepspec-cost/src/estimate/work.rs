//! What is to be done.

use std::fmt;
use std::ops::{Add, Mul};

use serde::{Deserialize, Serialize};

/// A stage from prompts to a judged drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The target answers the prompts (`regenerate`).
    Answers,
    /// Its states are captured (`cache build`, or beside training).
    States,
    /// The drafter learns from them (`deepspec-train`).
    Training,
    /// Its accepted length is measured (`deepspec-eval run`).
    Evaluation,
}

impl Stage {
    /// In the order in which they run.
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

/// Something that devices do.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Work {
    /// Floating-point operations: two per multiplication of the products that the architectures ask for, masked attention not counted.
    #[serde(default)]
    pub operations: f64,
    /// Bytes that memory gives or takes.
    #[serde(default)]
    pub bytes: f64,
    /// Times that all layers are gone through: forwards, micro-batches, steps of decoding.
    #[serde(default)]
    pub passes: f64,
}

impl Work {
    /// Operations, bytes, passes.
    pub(crate) fn parts(self) -> [f64; 3] {
        [self.operations, self.bytes, self.passes]
    }

    /// What is no work about it: the key, what it is, and what it has to be.
    pub fn problem(&self) -> Option<String> {
        let named = [("operations", self.operations), ("bytes", self.bytes), ("passes", self.passes)];
        if let Some((key, value)) = named.iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
            return Some(format!("`{key}` is {value}; expected a number of at least 0"));
        }
        (self.parts() == [0.0; 3]).then(|| "has no `operations`, `bytes` or `passes`".into())
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
