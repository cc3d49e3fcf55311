//! Allowed ranges of request fields.

use crate::error::ChatError;

/// Penalties, with the values that disable them.
pub(crate) const PENALTIES: [(&str, f64); 3] =
    [("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("repetition_penalty", 1.0)];

/// Checks that a value is between two bounds.
///
/// # Errors
/// Fails if it is outside.
pub(crate) fn check_range(name: &str, value: f64, least: f64, most: f64) -> Result<f64, ChatError> {
    let inside = (least..=most).contains(&value);
    inside
        .then_some(value)
        .ok_or_else(|| ChatError::field(name, format!("{value} is not between {least} and {most}")))
}

/// Checks a probability mass.
///
/// # Errors
/// Fails unless it is above 0 and at most 1.
pub(crate) fn check_top_p(value: f64) -> Result<f64, ChatError> {
    let inside = value > 0.0 && value <= 1.0;
    inside
        .then_some(value)
        .ok_or_else(|| ChatError::field("top_p", format!("{value} is not above 0 and at most 1")))
}
