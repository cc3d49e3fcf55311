//! From the sums of a logging window to DSpark's and DFlash's metrics.

use serde_json::{Map, Value, json};

use super::objective::BlockSum;
use crate::Metrics;
use crate::losses::{LossAlphas, TERMS};

/// What the sums of a block drafter's micro-batches mean.
#[derive(Debug, Clone, Copy)]
pub struct BlockMetrics {
    alphas: LossAlphas,
    block_size: usize,
}

impl BlockMetrics {
    /// Those of blocks of γ tokens under these weights of the losses.
    pub fn new(alphas: LossAlphas, block_size: usize) -> Self {
        Self { alphas, block_size }
    }
}

impl Metrics for BlockMetrics {
    fn count(&self) -> usize {
        BlockSum::all(self.block_size).count()
    }

    fn headline(&self) -> &'static [(&'static str, &'static str)] {
        &[("ce", "ce_loss"), ("l1", "l1_loss"), ("conf", "confidence_loss"), ("τ", "tau_probabilistic")]
    }

    fn metrics(&self, sums: &[f64], samples: usize) -> Map<String, Value> {
        let sum = |sum: BlockSum| sums[sum.place(self.block_size)];
        let ratio = |num: BlockSum, den: BlockSum| if sum(den) > 0.0 { sum(num) / sum(den) } else { 0.0 };
        let mean = |num: BlockSum| ratio(num, BlockSum::Weight);
        let positions = 0..self.block_size;
        let accept: Vec<f64> = positions.map(|k| ratio(BlockSum::Accept(k), BlockSum::Count(k))).collect();
        let metrics = json!({
            "loss": mean(BlockSum::Loss),
            "ce_loss": mean(BlockSum::CE),
            "l1_loss": mean(BlockSum::L1),
            "confidence_loss": mean(BlockSum::Confidence),
            "tau_probabilistic": ratio(BlockSum::Tau, BlockSum::Blocks),
            "accept_rate": accept,
            "confidence_abs_error": mean(BlockSum::ConfidenceAbsError),
            "confidence_bias": mean(BlockSum::ConfidenceBias),
            "confidence_prefix_bias": mean(BlockSum::PrefixBias),
            "anchors_per_sample": sum(BlockSum::Blocks) / samples.max(1) as f64,
            "supervised_per_block": ratio(BlockSum::Slots, BlockSum::Blocks),
        });
        let Value::Object(mut metrics) = metrics else { return Map::new() };
        for (place, term) in TERMS.iter().enumerate().filter(|(_, term)| term.is_reported(&self.alphas)) {
            // Those that stand above keep their place.
            metrics.insert(format!("{}_loss", term.name()), json!(mean(BlockSum::Term(place))));
        }
        if self.alphas.dpace.is_some() {
            metrics.insert("dpace_loss".into(), json!(mean(BlockSum::Dpace)));
        }
        metrics
    }
}
