//! Training samples, and the denominator of their loss.

use tch::Tensor;

/// One training sequence with the target's hidden states.
pub struct TrainSample {
    /// Token ids, T entries.
    pub input_ids: Vec<i64>,
    /// Whether each token is supervised, T flags.
    pub loss_mask: Vec<bool>,
    /// Captured hidden states, `[T, m·d]`.
    pub taps: Tensor,
    /// Hidden states after the final norm at `last_positions`, `[M, d]`.
    pub last: Tensor,
    /// Positions of the rows of `last`, ascending.
    pub last_positions: Vec<u32>,
    /// Anchor positions of this pass, ascending; see [`DrafterPlan::choose_anchors`](crate::DrafterPlan::choose_anchors).
    pub anchors: Vec<usize>,
}

impl TrainSample {
    /// Row of `last` that holds the state of the token at `position`.
    ///
    /// # Panics
    /// If `last` lacks the position. Callers must provide the states that predict supervised labels.
    pub(crate) fn final_state_row_index(&self, position: usize) -> i64 {
        match self.last_positions.binary_search(&(position as u32)) {
            Ok(row) => row as i64,
            Err(_) => panic!(
                "the sample lacks the last hidden state of position {position}, which predicts a supervised label"
            ),
        }
    }
}

/// Loss denominator of one optimiser step: Σ of the loss weights of its samples, known before the forward pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossDenominator(pub f64);

impl LossDenominator {
    /// Factor of the losses of all drafters but Eagle3: 1 / (denominator + 1e-6).
    pub fn scale(self) -> f64 {
        1.0 / (self.0 + 1e-6)
    }
}
