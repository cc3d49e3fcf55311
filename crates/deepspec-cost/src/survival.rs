//! Converts logits to confidences c_k, and these to survival probabilities a_k = Π_{i≤k} c_i
//! (docs/architecture.md, Reliability).

use crate::ScheduleError;

/// The logistic function 1 / (1 + e^−x) in float32, as the reference's evaluator computes
/// confidences.
pub fn sigmoid_f32(logit: f32) -> f32 {
    1.0 / (1.0 + (-logit).exp())
}

/// The logistic function 1 / (1 + e^−x).
pub fn sigmoid(logit: f64) -> f64 {
    1.0 / (1.0 + (-logit).exp())
}

/// Survival probabilities a_1, a_2, …: the running product of conditional confidences.
pub fn survival_probabilities(confidences: &[f64]) -> impl Iterator<Item = f64> + '_ {
    confidences.iter().scan(1.0, |product, &confidence| {
        *product *= confidence;
        Some(*product)
    })
}

/// Fails if a confidence is not a probability. Checked survivals lie in [0, 1] and never rise.
pub(crate) fn check_confidences(confidences: &[f64]) -> Result<(), ScheduleError> {
    match confidences.iter().position(|confidence| !(0.0..=1.0).contains(confidence)) {
        Some(position) => Err(ScheduleError::Confidence { position, value: confidences[position] }),
        None => Ok(()),
    }
}

/// Fails if a proposal of this length cannot have this outcome.
pub(crate) fn check_outcome(accepted: usize, proposed: usize, positions: usize) -> Result<(), ScheduleError> {
    if proposed > positions {
        return Err(ScheduleError::TooLong { proposed, positions });
    }
    if accepted > proposed {
        return Err(ScheduleError::Accepted { accepted, proposed });
    }
    Ok(())
}
