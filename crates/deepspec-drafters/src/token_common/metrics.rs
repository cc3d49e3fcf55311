//! Metrics of drafters that are trained in steps, each of which drafts one token further.

use serde_json::{Map, Value, json};

/// Sums of a step: Σ losses, supervised rows, rows where the argmaxes of drafter and target agree, and Σ of accept rates.
pub const STEP_SUMS: usize = 4;

/// Sums behind those of the steps: τ of greedy drafts, τ of sampled drafts, and positions supervised at step 0.
pub const TAU_SUMS: usize = 3;

/// Metrics that a log line shows after the loss.
pub const HEADLINE: &[(&str, &str)] =
    &[("first", "first_loss"), ("last", "last_loss"), ("τ", "tau_probabilistic")];

/// Metrics from the sums of all steps, `steps · STEP_SUMS`, and from the sums of τ. `loss` and `losses` are the loss and each step's.
pub fn step_metrics(loss: f64, losses: &[f64], steps: &[f64], taus: &[f64]) -> Map<String, Value> {
    let per_step = |of: &dyn Fn(&[f64]) -> f64| steps.chunks(STEP_SUMS).map(of).collect::<Vec<_>>();
    let metrics = json!({
        "loss": loss,
        "step_loss": losses,
        "first_loss": losses.first(),
        "last_loss": losses.last(),
        "valid_tokens": per_step(&|step| step[1]),
        "accuracy": per_step(&|step| ratio(step[2], step[1])),
        "accept_rate": per_step(&|step| ratio(step[3], step[1])),
        "tau_greedy": 1.0 + ratio(taus[0], taus[2]),
        "tau_probabilistic": 1.0 + ratio(taus[1], taus[2]),
    });
    match metrics {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// `num / den`, and 0 where nothing was counted.
pub fn ratio(num: f64, den: f64) -> f64 {
    if den > 0.0 { num / den } else { 0.0 }
}
