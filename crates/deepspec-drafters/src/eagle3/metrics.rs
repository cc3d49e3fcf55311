//! From the sums of a logging window to Eagle3's metrics.

use serde_json::{Map, Value, json};

use crate::Metrics;

/// What the sums of an Eagle3 drafter's micro-batches mean: per step Σ w·CE, supervised rows, rows where draft and target agree
/// on the best token, and Σ accept rate; then Σ of chains of both, supervised columns of step 0, and sequences.
#[derive(Debug, Clone, Copy)]
pub struct Eagle3Metrics {
    steps: usize,
    decay: f64,
}

impl Eagle3Metrics {
    /// Those of so many steps, the loss of step s weighing `decay`^s.
    pub fn new(steps: usize, decay: f64) -> Self {
        Self { steps, decay }
    }
}

impl Metrics for Eagle3Metrics {
    fn count(&self) -> usize {
        4 * self.steps + 4
    }

    fn headline(&self) -> &'static [(&'static str, &'static str)] {
        &[("first", "first_loss"), ("last", "last_loss"), ("τ", "tau_probabilistic")]
    }

    fn metrics(&self, sums: &[f64], _samples: usize) -> Map<String, Value> {
        let ratio = |num: f64, den: f64| if den > 0.0 { num / den } else { 0.0 };
        let (steps, tail) = sums.split_at(4 * self.steps);
        let (columns, sequences) = (tail[2], tail[3]);
        let per_step = |of: &dyn Fn(&[f64]) -> f64| steps.chunks(4).map(of).collect::<Vec<_>>();
        let losses = per_step(&|step| ratio(step[0], sequences));
        let weighted = losses.iter().enumerate().map(|(s, loss)| self.decay.powi(s as i32) * loss);
        let metrics = json!({
            "loss": weighted.sum::<f64>(),
            "step_loss": losses,
            "first_loss": losses.first(),
            "last_loss": losses.last(),
            "valid_tokens": per_step(&|step| step[1]),
            "accuracy": per_step(&|step| ratio(step[2], step[1])),
            "accept_rate": per_step(&|step| ratio(step[3], step[1])),
            "tau_greedy": 1.0 + ratio(tail[0], columns),
            "tau_probabilistic": 1.0 + ratio(tail[1], columns),
        });
        match metrics {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }
}
