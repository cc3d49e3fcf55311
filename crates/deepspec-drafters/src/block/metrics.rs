//! From the sums of a logging window to DSpark's and DFlash's metrics.

use serde_json::{Map, Value, json};

use super::objective::LossSums;
use crate::Metrics;
use crate::losses::LossAlphas;

/// What the sums of a block drafter's micro-batches mean.
#[derive(Debug, Clone)]
pub struct BlockMetrics {
    alphas: LossAlphas,
    block_size: usize,
    names: Vec<String>,
}

impl BlockMetrics {
    /// Those of blocks of γ tokens under these weights of the losses.
    pub fn new(alphas: LossAlphas, block_size: usize) -> Self {
        Self { alphas, block_size, names: LossSums::names(block_size) }
    }
}

impl Metrics for BlockMetrics {
    fn count(&self) -> usize {
        self.names.len()
    }

    fn headline(&self) -> &'static [(&'static str, &'static str)] {
        &[("ce", "ce_loss"), ("l1", "l1_loss"), ("conf", "confidence_loss"), ("τ", "tau_probabilistic")]
    }

    fn metrics(&self, sums: &[f64], samples: usize) -> Map<String, Value> {
        let sum = |name: &str| match self.names.iter().position(|known| known == name) {
            Some(place) => sums[place],
            None => panic!("there is no sum of the name {name}"),
        };
        let ratio = |num: &str, den: &str| if sum(den) > 0.0 { sum(num) / sum(den) } else { 0.0 };
        let (ce, l1, confidence) =
            (ratio("ce", "weight"), ratio("l1", "weight"), ratio("confidence", "weight"));
        let accept: Vec<f64> =
            (0..self.block_size).map(|k| ratio(&format!("accept@{k}"), &format!("count@{k}"))).collect();
        let metrics = json!({
            "loss": ratio("loss", "weight"),
            "ce_loss": ce,
            "l1_loss": l1,
            "confidence_loss": confidence,
            "tau_probabilistic": ratio("tau", "blocks"),
            "accept_rate": accept,
            "confidence_abs_error": ratio("confidence_abs_error", "weight"),
            "confidence_bias": ratio("confidence_bias", "weight"),
            "confidence_prefix_bias": ratio("prefix_bias", "weight"),
            "anchors_per_sample": sum("blocks") / samples.max(1) as f64,
            "supervised_per_block": ratio("slots", "blocks"),
        });
        let Value::Object(mut metrics) = metrics else { return Map::new() };
        let LossAlphas { soft_ce, kl, lk, dpace, .. } = self.alphas;
        let learned = [
            ("soft_ce", soft_ce != 0.0),
            ("kl", kl != 0.0),
            ("lk", lk.is_some()),
            ("dpace", dpace.is_some()),
        ];
        for (name, _) in learned.into_iter().filter(|(_, learned)| *learned) {
            metrics.insert(format!("{name}_loss"), json!(ratio(name, "weight")));
        }
        metrics
    }
}
