//! Training samples, and the denominator of their loss.

use tch::Tensor;

/// One training sequence with the target's states.
pub struct TrainSample {
    /// Token ids, T of them.
    pub input_ids: Vec<i64>,
    /// Supervised tokens, T flags.
    pub loss_mask: Vec<bool>,
    /// Captured states `[T, m·d]`.
    pub taps: Tensor,
    /// Final-normed states `[M, d]` of some positions.
    pub last: Tensor,
    /// Their positions, increasing.
    pub last_positions: Vec<u32>,
    /// Anchor positions of this pass, increasing; each one a candidate of the drafter's.
    pub anchors: Vec<usize>,
}

impl TrainSample {
    /// Row of `last` that holds the state of the token at `position`.
    ///
    /// # Panics
    /// If it is not there; a caller's samples hold the states that predict supervised labels, by contract.
    pub(crate) fn last_row(&self, position: usize) -> i64 {
        match self.last_positions.binary_search(&(position as u32)) {
            Ok(row) => row as i64,
            Err(_) => panic!(
                "the sample lacks the last hidden state of position {position}, which predicts a supervised label"
            ),
        }
    }
}

/// The denominator of one optimiser step: Σ of the loss weights of all its samples, known before any forward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossDenominator(pub f64);

impl LossDenominator {
    /// Factor on the sums of block drafters: one over the denominator + 1e-6.
    pub fn scale(self) -> f64 {
        1.0 / (self.0 + 1e-6)
    }
}
