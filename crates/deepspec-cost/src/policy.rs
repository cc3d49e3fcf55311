//! Policies that decide how much of each drafted block an engine verifies.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A rule for the lengths of verified prefixes. No rule decides on a token by the tokens after it,
/// so answers follow the target's distribution.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Policy {
    /// Plain decoding without drafts.
    Plain,
    /// Verifies whole blocks.
    #[default]
    Whole,
    /// Verifies at most this many tokens of each block.
    Fixed(usize),
    /// Verifies the tokens before the first one whose confidence is below the threshold.
    Threshold(f64),
    /// Prefix scheduler: admits the best tokens first while throughput rises (Algorithm 1). It
    /// drafts nothing if that would not pay.
    Prefix,
    /// [`Policy::Prefix`] with a token budget from the confidences of two steps before, for engines
    /// whose host runs ahead of the device.
    PrefixAsync,
}

impl Policy {
    /// Whether the policy reads confidences.
    pub fn reads_confidence(self) -> bool {
        matches!(self, Self::Threshold(_) | Self::Prefix | Self::PrefixAsync)
    }

    /// Whether the policy cuts blocks by confidence. A run with such a policy does not observe the
    /// tokens that were cut.
    pub fn cuts_by_confidence(self) -> bool {
        self.reads_confidence() && self != Self::Threshold(0.0)
    }

    /// Whether the policy needs step costs.
    pub fn reads_cost(self) -> bool {
        matches!(self, Self::Prefix | Self::PrefixAsync)
    }
}

/// Names of the policies in arguments, for error messages.
const POLICY_NAMES: &str = "plain, whole, fixed:K, threshold:t, prefix or prefix-async";

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None => match text {
                "plain" => Ok(Self::Plain),
                "whole" => Ok(Self::Whole),
                "prefix" => Ok(Self::Prefix),
                "prefix-async" => Ok(Self::PrefixAsync),
                _ => Err(format!("expected {POLICY_NAMES}")),
            },
            Some(("fixed", count)) => match count.parse() {
                Ok(count) if count > 0 => Ok(Self::Fixed(count)),
                _ => Err("expected fixed:K with K of at least 1 token; nothing is drafted by plain".into()),
            },
            Some(("threshold", value)) => match value.parse() {
                Ok(value) if (0.0..=1.0).contains(&value) => Ok(Self::Threshold(value)),
                _ => Err("expected threshold:t with t between 0 and 1".into()),
            },
            Some(_) => Err(format!("expected {POLICY_NAMES}")),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain => write!(f, "plain"),
            Self::Whole => write!(f, "whole"),
            Self::Fixed(count) => write!(f, "fixed:{count}"),
            Self::Threshold(value) => write!(f, "threshold:{value}"),
            Self::Prefix => write!(f, "prefix"),
            Self::PrefixAsync => write!(f, "prefix-async"),
        }
    }
}

impl TryFrom<String> for Policy {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Policy> for String {
    fn from(policy: Policy) -> Self {
        policy.to_string()
    }
}
