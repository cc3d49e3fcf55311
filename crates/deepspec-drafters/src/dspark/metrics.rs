//! From the sums of a logging window to DSpark's and DFlash's metrics.

use deepspec_ops::distill_loss::LossRecipe;
use serde_json::{Map, Value};

use super::objective::BlockSum;
use crate::Metrics;
use crate::block_common::sums::Window;

/// What the sums of a block drafter's micro-batches mean.
#[derive(Debug, Clone, Copy)]
pub struct BlockMetrics {
    loss: LossRecipe,
    gamma: usize,
}

impl BlockMetrics {
    /// Those of blocks of γ drafts under these weights of the losses.
    pub fn new(loss: LossRecipe, gamma: usize) -> Self {
        Self { loss, gamma }
    }
}

impl Metrics for BlockMetrics {
    fn count(&self) -> usize {
        BlockSum::all(self.gamma).count()
    }

    fn headline(&self) -> &'static [(&'static str, &'static str)] {
        &[("ce", "ce_loss"), ("l1", "l1_loss"), ("conf", "confidence_loss"), ("τ", "tau_probabilistic")]
    }

    fn metrics(&self, sums: &[f64], samples: usize) -> Map<String, Value> {
        let window = Window { gamma: self.gamma, sums };
        let mean = |own| window.mean(window.own(&BlockSum::OWN, own));
        let own = [
            ("confidence_abs_error", mean(BlockSum::ConfidenceAbsError)),
            ("confidence_bias", mean(BlockSum::ConfidenceBias)),
            ("confidence_prefix_bias", mean(BlockSum::PrefixBias)),
        ];
        window.metrics(&self.loss, samples, ("confidence_loss", mean(BlockSum::Confidence)), &own)
    }
}
