//! From the sums of a logging window to DFlash 2's metrics.

use deepspec_ops::distill_loss::LossRecipe;
use serde_json::{Map, Value};

use crate::Metrics;
use crate::block_common::AnchoredSum;
use crate::block_common::sums::{Window, ratio};

/// Sums of a micro-batch. Accept rates are those of the selector behind the true previous tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DFlash2Sum {
    /// What all drafters of anchored blocks have.
    Shared(AnchoredSum),
    /// The selector's cross entropy with position weights.
    Selector,
    /// Labels that were among the candidates.
    Recalled,
}

impl DFlash2Sum {
    /// Those of this kind alone, in the order in which they stand.
    pub const OWN: [Self; 2] = [Self::Selector, Self::Recalled];

    /// All of them for blocks of γ drafts, in the order in which they stand.
    pub fn all(gamma: usize) -> impl Iterator<Item = Self> {
        AnchoredSum::all(gamma).map(Self::Shared).chain(Self::OWN)
    }
}

/// What the sums of a DFlash 2 drafter's micro-batches mean.
#[derive(Debug, Clone, Copy)]
pub struct DFlash2Metrics {
    /// Weights of the losses.
    pub loss: LossRecipe,
    /// γ.
    pub gamma: usize,
}

impl Metrics for DFlash2Metrics {
    fn count(&self) -> usize {
        DFlash2Sum::all(self.gamma).count()
    }

    fn headline(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("ce", "ce_loss"),
            ("selector", "selector_loss"),
            ("recall", "candidate_recall"),
            ("τ", "tau_probabilistic"),
        ]
    }

    fn metrics(&self, sums: &[f64], samples: usize) -> Map<String, Value> {
        let window = Window { gamma: self.gamma, sums };
        let own = |sum| window.own(&DFlash2Sum::OWN, sum);
        let selector = window.mean(own(DFlash2Sum::Selector));
        let recall = ratio(own(DFlash2Sum::Recalled), window.of(AnchoredSum::Drafts));
        window.metrics(&self.loss, samples, ("selector_loss", selector), &[("candidate_recall", recall)])
    }
}
