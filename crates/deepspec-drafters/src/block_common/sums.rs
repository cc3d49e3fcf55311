//! Sums of a micro-batch that all block drafters have, and their metrics.

use deepspec_ops::distill_loss::{Column, LossOutput, LossRecipe, TERMS};
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use super::BlockBatch;

/// Sums that add up over micro-batches and ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockLossSum {
    /// Σ of the position weights.
    Weight,
    /// The numerator of the whole loss.
    Loss,
    /// One of the loss terms, with position weights only.
    Term(usize),
    /// The cross entropy with position weights that follow the drafter.
    AdaptiveCe,
    /// Σ over the blocks of 1 + Π accept rates.
    Tau,
    /// Number of blocks.
    Blocks,
    /// Number of supervised drafts.
    Drafts,
    /// Σ of accept rates at a position.
    Accept(usize),
    /// Number of supervised drafts at a position.
    Count(usize),
}

impl BlockLossSum {
    /// The label's cross entropy.
    pub const CE: Self = Self::Term(0);
    /// ‖p^d − p^t‖₁.
    pub const L1: Self = Self::Term(1);

    /// All sums for blocks of γ drafts, in their order.
    pub fn all(gamma: usize) -> impl Iterator<Item = Self> {
        let terms = (0..TERMS.len()).map(Self::Term);
        [Self::Weight, Self::Loss]
            .into_iter()
            .chain(terms)
            .chain([Self::AdaptiveCe, Self::Tau, Self::Blocks, Self::Drafts])
            .chain((0..gamma).map(Self::Accept))
            .chain((0..gamma).map(Self::Count))
    }

    /// Its name, for messages and tests.
    pub fn name(self) -> String {
        match self {
            Self::Weight => "weight".into(),
            Self::Loss => "loss".into(),
            Self::Term(term) => TERMS[term].name().into(),
            Self::AdaptiveCe => "adaptive_ce".into(),
            Self::Tau => "tau".into(),
            Self::Blocks => "blocks".into(),
            Self::Drafts => "drafts".into(),
            Self::Accept(position) => format!("accept@{position}"),
            Self::Count(position) => format!("count@{position}"),
        }
    }
}

impl BlockBatch {
    /// Values of the supervised drafts `[R]` at their slots, `[A, γ]`, and 0 elsewhere.
    pub(crate) fn by_block(&self, rows: &Tensor) -> Tensor {
        let all = Tensor::zeros([self.previous.numel() as i64], (Kind::Float, rows.device()));
        all.index_add(0, &self.rows, rows).view_as(&self.previous)
    }

    /// Σ of values of the supervised drafts `[R]`, with position weights.
    pub(crate) fn weighted(&self, values: &Tensor) -> Tensor {
        (values * &self.weights).sum(Kind::Float)
    }

    /// Every [`BlockLossSum`], `[K]` float64; `loss` is the numerator of the whole loss, `accept [R]` are the accept rates.
    pub(crate) fn sums(&self, output: &LossOutput, loss: &Tensor, accept: &Tensor) -> Tensor {
        let (device, count) = (accept.device(), accept.size()[0] as f64);
        let accepted = self.by_block(accept);
        let survival = accepted.cumprod(1, Kind::Float); // Π accept rate, 0 behind the supervised drafts
        let accepted_at = accepted.sum_dim_intlist(0, false, Kind::Double);
        let supervised_at = self.by_block(&accept.ones_like()).sum_dim_intlist(0, false, Kind::Double);
        // Filled on the device: a host's number would need a copy.
        let number = |value: f64| Tensor::full([], value, (Kind::Double, device));
        let value = |sum: BlockLossSum| match sum {
            BlockLossSum::Weight => self.weights.sum(Kind::Float),
            BlockLossSum::Loss => loss.shallow_clone(),
            BlockLossSum::Term(term) => self.weighted(&output.column(Column::Term(term))),
            BlockLossSum::AdaptiveCe => output.column(Column::AdaptiveCe).sum(Kind::Float),
            BlockLossSum::Tau => survival.sum(Kind::Double) + self.blocks as f64,
            BlockLossSum::Blocks => number(self.blocks as f64),
            BlockLossSum::Drafts => number(count),
            BlockLossSum::Accept(position) => accepted_at.get(position as i64),
            BlockLossSum::Count(position) => supervised_at.get(position as i64),
        };
        joined(BlockLossSum::all(self.previous.size()[1] as usize).map(value))
    }
}

/// Joins sums, `[K]` float64.
pub(crate) fn joined(sums: impl Iterator<Item = Tensor>) -> Tensor {
    Tensor::cat(&sums.map(|sum| sum.to_kind(Kind::Double).reshape([1])).collect::<Vec<_>>(), 0)
}

/// Sums of a logging window.
pub(crate) struct Window<'a> {
    /// γ, drafted tokens per block.
    pub gamma: usize,
    /// The sums of [`BlockLossSum::all`], and then the drafter's own.
    pub sums: &'a [f64],
}

impl Window<'_> {
    /// One of the shared sums.
    pub fn of(&self, sum: BlockLossSum) -> f64 {
        self.sums[BlockLossSum::all(self.gamma).take_while(|other| *other != sum).count()]
    }

    /// One of the drafter's `own` sums, in this order.
    pub fn own<S: PartialEq>(&self, own: &[S], sum: S) -> f64 {
        let place = own.iter().take_while(|other| **other != sum).count();
        self.sums[BlockLossSum::all(self.gamma).count() + place]
    }

    /// The mean of a sum with position weights.
    pub fn mean(&self, weighted: f64) -> f64 {
        ratio(weighted, self.of(BlockLossSum::Weight))
    }

    /// Metrics of all block drafters. `loss` is the drafter's own loss and `own` its further metrics, by name.
    pub fn metrics(
        &self,
        recipe: &LossRecipe,
        samples: usize,
        loss: (&str, f64),
        own: &[(&str, f64)],
    ) -> Map<String, Value> {
        let mean = |sum| self.mean(self.of(sum));
        let rate = |k| ratio(self.of(BlockLossSum::Accept(k)), self.of(BlockLossSum::Count(k)));
        let (blocks, drafts) = (self.of(BlockLossSum::Blocks), self.of(BlockLossSum::Drafts));
        let mut metrics = Map::new();
        let mut put = |name: &str, value: Value| metrics.insert(name.to_string(), value);
        put("loss", json!(mean(BlockLossSum::Loss)));
        put("ce_loss", json!(mean(BlockLossSum::CE)));
        put("l1_loss", json!(mean(BlockLossSum::L1)));
        put(loss.0, json!(loss.1));
        put("tau_probabilistic", json!(ratio(self.of(BlockLossSum::Tau), blocks)));
        put("accept_rate", json!((0..self.gamma).map(rate).collect::<Vec<_>>()));
        for (name, value) in own {
            put(name, json!(value));
        }
        put("anchors_per_sample", json!(blocks / samples.max(1) as f64));
        put("supervised_per_block", json!(ratio(drafts, blocks)));
        for (place, term) in TERMS.iter().enumerate().filter(|(_, term)| term.is_reported(recipe)) {
            // Terms that are there already keep their place.
            put(&format!("{}_loss", term.name()), json!(mean(BlockLossSum::Term(place))));
        }
        if recipe.dpace.is_some() {
            put("dpace_loss", json!(mean(BlockLossSum::AdaptiveCe)));
        }
        if recipe.until_first_error {
            put("ce_until_first_error_loss", json!(mean(BlockLossSum::AdaptiveCe)));
        }
        metrics
    }
}

/// `numerator` over `denominator`; 0 where the latter is 0.
pub(crate) fn ratio(numerator: f64, denominator: f64) -> f64 {
    if denominator > 0.0 { numerator / denominator } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sum_stands_once_and_is_found_there() {
        let gamma = 3;
        let all: Vec<BlockLossSum> = BlockLossSum::all(gamma).collect();
        let sums: Vec<f64> = (0..all.len()).map(|place| place as f64).collect();
        let window = Window { gamma, sums: &sums };
        for (place, sum) in all.iter().enumerate() {
            assert_eq!(window.of(*sum), place as f64, "{}", sum.name());
        }
        assert_eq!([BlockLossSum::CE.name(), BlockLossSum::L1.name()], ["ce", "l1"]);
    }
}
