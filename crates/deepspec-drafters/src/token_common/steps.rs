//! Objective and metrics of drafters whose training steps draft one token further each: cross entropy, weighted by the step.

use deepspec_core::recipe::require_at_least_one;
use tch::{Kind, Tensor};

use super::metrics::{HEADLINE, STEP_SUMS, TAU_SUMS, ratio, step_metrics};
use super::step_batch::{StepBatch, supervised_count};
use crate::{ConfigIssue, Metrics};

/// Upper limit of `num_speculative_steps`. A larger value is a mistake that would exhaust memory.
pub const MAX_STEPS: usize = 64;

/// Checks the number of steps and the base of their weights.
///
/// # Errors
/// A key of the recipe, and the problem with its value.
pub fn check_steps(num_speculative_steps: usize, step_weight_beta: f64) -> Result<(), ConfigIssue> {
    require_at_least_one(&[("num_speculative_steps", num_speculative_steps)])?;
    if step_weight_beta > 0.0 && step_weight_beta <= 1.0 {
        return Ok(());
    }
    Err(("step_weight_beta", format!("{step_weight_beta} is not in (0, 1]")))
}

/// Checks the number of steps against its upper limit.
///
/// # Errors
/// As [`check_steps`].
pub fn check_max_steps(num_speculative_steps: usize) -> Result<(), ConfigIssue> {
    if (1..=MAX_STEPS).contains(&num_speculative_steps) {
        return Ok(());
    }
    let problem = format!("{num_speculative_steps} is not between 1 and {MAX_STEPS}");
    Err(("num_speculative_steps", problem))
}

/// The objective of a drafter that is trained in steps.
#[derive(Debug, Clone, PartialEq)]
pub struct StepObjective {
    /// Weight of each step in the loss, K entries whose sum is 1.
    pub step_weights: Vec<f64>,
}

impl StepObjective {
    /// Weights beta^j / Σ beta^i of `steps` steps (FastMTP, arXiv 2509.18362).
    pub fn new(beta: f64, steps: usize) -> Self {
        let powers: Vec<f64> = (0..steps).map(|step| beta.powi(step as i32)).collect();
        let total: f64 = powers.iter().sum();
        Self { step_weights: powers.into_iter().map(|power| power / total).collect() }
    }

    /// A sample's contribution to the loss denominator: the weights of all its supervised rows.
    pub fn loss_denominator_part(&self, loss_mask: &[bool]) -> f64 {
        let steps = self.step_weights.len();
        let of_step =
            |(step, weight): (usize, &f64)| weight * supervised_count(loss_mask, step, steps) as f64;
        self.step_weights.iter().enumerate().map(of_step).sum()
    }

    /// Metrics from the sums of [`step_sums`].
    pub fn metric_defs(&self) -> Metrics {
        let weights = self.step_weights.clone();
        let split = STEP_SUMS * weights.len();
        let compute = move |sums: &[f64], _: usize| {
            let (by_step, taus) = sums.split_at(split);
            let steps = || by_step.chunks(STEP_SUMS);
            let losses: Vec<f64> = steps().map(|step| ratio(step[0], step[1])).collect();
            let weighted =
                |sum: usize| steps().zip(&weights).map(|(step, weight)| weight * step[sum]).sum::<f64>();
            step_metrics(ratio(weighted(0), weighted(1)), &losses, by_step, taus)
        };
        Metrics { count: split + TAU_SUMS, headline: HEADLINE, compute: Box::new(compute) }
    }
}

/// Measurements of the supervised rows, `[R]` each.
pub struct StepRows {
    /// Cross entropy with the label.
    pub ce: Tensor,
    /// 1 where the argmaxes of drafter and target agree, and else 0.
    pub agreement: Tensor,
    /// Σ min(p^d, p^t), the probability that a sampled draft is accepted.
    pub accept: Tensor,
}

/// Sums of the metrics, `[STEP_SUMS · K + TAU_SUMS]` float64: those of each step, with Σ CE for the losses, and those of τ.
pub fn step_sums(batch: &StepBatch, rows: &StepRows) -> Tensor {
    let (steps, positions) = (batch.steps() as i64, batch.positions());
    let columns = [&rows.ce, &rows.ce.ones_like(), &rows.agreement, &rows.accept];
    let columns = Tensor::stack(&columns, 1).to_kind(Kind::Double); // [R, STEP_SUMS]
    let all = Tensor::zeros([steps * positions, STEP_SUMS as i64], (Kind::Double, columns.device()));
    let all = all.index_copy(0, &batch.rows, &columns).view([steps, positions, STEP_SUMS as i64]);
    let by_step = all.sum_dim_intlist(1, false, Kind::Double); // [K, STEP_SUMS]
    // A chain of drafts from a position ends where a draft is rejected, or where its label is not supervised.
    let chains =
        all.narrow(2, 2, 2).cumprod(0, Kind::Double).sum_dim_intlist([0, 1].as_slice(), false, Kind::Double);
    let first = by_step.get(0).narrow(0, 1, 1);
    Tensor::cat(&[by_step.flatten(0, 1), chains, first], 0)
}
