//! Errors of invalid confidences, proposals, temperatures and costs.

use std::fmt;

/// Invalid input numbers; positions and requests count from 0.
#[derive(Debug, Clone, PartialEq)]
pub enum ScheduleError {
    /// A confidence is not a probability.
    Confidence {
        /// Position in the proposal.
        position: usize,
        /// The confidence, outside [0, 1] or NaN.
        value: f64,
    },
    /// A confidence logit is NaN.
    Logit {
        /// Position in the proposal.
        position: usize,
    },
    /// More tokens were accepted than proposed.
    Accepted {
        /// Number of accepted tokens.
        accepted: usize,
        /// Number of proposed tokens.
        proposed: usize,
    },
    /// A proposal has more tokens than there are positions.
    TooLong {
        /// Number of proposed tokens.
        proposed: usize,
        /// Number of positions.
        positions: usize,
    },
    /// Two accumulators of different shape cannot be merged.
    Mismatch {
        /// The quantity that differs.
        what: &'static str,
        /// Count on the left.
        left: usize,
        /// Count on the right.
        right: usize,
    },
    /// A temperature is not finite and positive.
    Temperature {
        /// Index in the list.
        index: usize,
        /// Value of the temperature.
        value: f64,
    },
    /// A rate or time of a cost curve is not finite and positive.
    Cost {
        /// Tokens in the batch.
        batch: usize,
        /// Rate in steps per second, or time in seconds.
        value: f64,
    },
    /// Measured batches are not strictly ascending within 1 … 2²⁰ tokens.
    Order {
        /// The batch that is out of order, in tokens.
        batch: usize,
    },
    /// There are more requests than the cost curve's largest batch has tokens.
    BeyondCurve {
        /// Number of requests; each needs one token of the batch.
        requests: usize,
        /// The largest batch of the curve.
        max_batch: usize,
    },
    /// A required list is empty.
    Empty {
        /// Name of the list.
        what: &'static str,
    },
}

impl fmt::Display for ScheduleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Confidence { position, value } => {
                write!(f, "confidence {value} at position {position} is not a probability in [0, 1]")
            }
            Self::Logit { position } => write!(f, "confidence logit at position {position} is NaN"),
            Self::Accepted { accepted, proposed } => {
                write!(f, "{accepted} tokens accepted of only {proposed} proposed")
            }
            Self::TooLong { proposed, positions } => {
                write!(f, "proposal of {proposed} tokens, but there are only {positions} positions")
            }
            Self::Mismatch { what, left, right } => {
                write!(f, "{left} {what} on the left, {right} on the right: they must be as many")
            }
            Self::Temperature { index, value } => {
                write!(f, "temperature {value} at index {index} is not finite and positive")
            }
            Self::Cost { batch, value } => {
                write!(f, "cost {value} of {batch} tokens or requests is not finite and positive")
            }
            Self::Order { batch } => {
                write!(
                    f,
                    "{batch} is out of order: measured batches, requests and contexts must ascend, from 1 at least to 2^20 at most"
                )
            }
            Self::BeyondCurve { requests, max_batch } => write!(
                f,
                "{requests} requests need a batch of as many tokens, but the cost curve ends at {max_batch}; profile further"
            ),
            Self::Empty { what } => write!(f, "no {what}"),
        }
    }
}

impl std::error::Error for ScheduleError {}
