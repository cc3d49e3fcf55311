//! Sums over a micro-batch, and the metrics of block drafters computed from them.

use deepspec_ops::distill_loss::{LossColumn, LossOutput, LossRecipe, TERMS};
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use super::BlockBatch;

/// A sum over a micro-batch, which is added up over micro-batches and ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossSum {
    /// Σ of the slot weights.
    Weight,
    /// Numerator of the total loss.
    Loss,
    /// Σ of slot weight · loss term, the term by its index in [`TERMS`].
    Term(usize),
    /// Σ of the cross entropy with weights that depend on the drafter (`dpace` or `until_first_error`).
    AdaptiveCe,
    /// Σ over the blocks of 1 + Σ_k Π_{j≤k} accept rate_j.
    Tau,
    /// Number of blocks.
    Blocks,
    /// Number of supervised drafts.
    Drafts,
    /// Σ of accept rates at a position.
    Accept(usize),
    /// Number of supervised drafts at a position.
    Count(usize),
    /// A sum that only one kind of drafter has.
    Own(&'static str),
}

impl LossSum {
    /// Cross entropy with the labels.
    pub const CE: Self = Self::Term(0);
    /// ‖p^d − p^t‖₁.
    pub const L1: Self = Self::Term(1);

    /// All sums for blocks of γ drafts, in order. The sums `own`, which only this kind of drafter has, come last.
    pub fn all(gamma: usize, own: &[&'static str]) -> impl Iterator<Item = Self> {
        let terms = (0..TERMS.len()).map(Self::Term);
        [Self::Weight, Self::Loss]
            .into_iter()
            .chain(terms)
            .chain([Self::AdaptiveCe, Self::Tau, Self::Blocks, Self::Drafts])
            .chain((0..gamma).map(Self::Accept))
            .chain((0..gamma).map(Self::Count))
            .chain(own.iter().map(|name| Self::Own(name)))
    }

    /// Name of the sum, for messages and tests.
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
            Self::Own(name) => name.into(),
        }
    }
}

impl BlockBatch {
    /// Scatters values of the supervised drafts `[R]` to their slots `[A, γ]`; other slots get 0.
    pub(crate) fn scatter_to_blocks(&self, rows: &Tensor) -> Tensor {
        let shape = [self.blocks as i64, self.gamma as i64];
        let all = Tensor::zeros([shape[0] * shape[1]], (Kind::Float, rows.device()));
        all.index_add(0, &self.supervised_indices, rows).view(shape)
    }

    /// Σ of slot weight · value over the supervised drafts, `values [R]`.
    pub(crate) fn weighted_sum(&self, values: &Tensor) -> Tensor {
        (values * &self.weights).sum(Kind::Float)
    }

    /// Every [`LossSum`], `[K]` float64. `loss` is the numerator of the total loss, `accept [R]` holds the accept rates, and `own` the sums
    /// that only this kind of drafter has.
    pub(crate) fn loss_sums<const N: usize>(
        &self,
        output: &LossOutput,
        loss: &Tensor,
        accept: &Tensor,
        own: [Tensor; N],
    ) -> Tensor {
        let (device, count) = (accept.device(), accept.size()[0] as f64);
        let accepted = self.scatter_to_blocks(accept);
        let survival = accepted.cumprod(1, Kind::Float); // Π accept rate, 0 behind the supervised drafts
        let accepted_at = accepted.sum_dim_intlist(0, false, Kind::Double);
        let supervised_at =
            self.scatter_to_blocks(&accept.ones_like()).sum_dim_intlist(0, false, Kind::Double);
        // Created on the device, which avoids a copy from the host.
        let number = |value: f64| Tensor::full([], value, (Kind::Double, device));
        let value = |sum: LossSum| match sum {
            LossSum::Weight => self.weights.sum(Kind::Float),
            LossSum::Loss => loss.shallow_clone(),
            LossSum::Term(term) => self.weighted_sum(&output.column(LossColumn::Term(term))),
            LossSum::AdaptiveCe => output.column(LossColumn::AdaptiveCe).sum(Kind::Float),
            LossSum::Tau => survival.sum(Kind::Double) + self.blocks as f64,
            LossSum::Blocks => number(self.blocks as f64),
            LossSum::Drafts => number(count),
            LossSum::Accept(position) => accepted_at.get(position as i64),
            LossSum::Count(position) => supervised_at.get(position as i64),
            LossSum::Own(_) => number(0.0),
        };
        let shared = LossSum::all(self.gamma, &[]).map(value);
        let sums = shared.chain(own).map(|sum| sum.to_kind(Kind::Double).reshape([1]));
        Tensor::cat(&sums.collect::<Vec<_>>(), 0)
    }
}

/// Sums of a logging window, from which metrics are computed.
pub(crate) struct LoggedSums<'a> {
    /// Drafted tokens per block, γ.
    pub gamma: usize,
    /// Names of the sums that only this kind of drafter has.
    pub own: &'a [&'static str],
    /// Values in the order of [`LossSum::all`].
    pub sums: &'a [f64],
}

impl LoggedSums<'_> {
    /// Value of a sum.
    pub fn get(&self, sum: LossSum) -> f64 {
        self.sums[LossSum::all(self.gamma, self.own).take_while(|other| *other != sum).count()]
    }

    /// Divides a sum over slot weights by the sum of the slot weights.
    pub fn weighted_mean(&self, weighted: f64) -> f64 {
        ratio(weighted, self.get(LossSum::Weight))
    }

    /// Metrics of block drafters. `loss` is the name and value of the loss that only this kind has, such as the confidence loss. `own`
    /// holds further metrics of the kind.
    pub fn to_metrics(
        &self,
        recipe: &LossRecipe,
        samples: usize,
        loss: (&str, f64),
        own: &[(&str, f64)],
    ) -> Map<String, Value> {
        let mean = |sum| self.weighted_mean(self.get(sum));
        let rate = |k| ratio(self.get(LossSum::Accept(k)), self.get(LossSum::Count(k)));
        let (blocks, drafts) = (self.get(LossSum::Blocks), self.get(LossSum::Drafts));
        let mut metrics = Map::new();
        let mut put = |name: &str, value: Value| metrics.insert(name.to_string(), value);
        put("loss", json!(mean(LossSum::Loss)));
        put("ce_loss", json!(mean(LossSum::CE)));
        put("l1_loss", json!(mean(LossSum::L1)));
        put(loss.0, json!(loss.1));
        put("tau_probabilistic", json!(ratio(self.get(LossSum::Tau), blocks)));
        put("accept_rate", json!((0..self.gamma).map(rate).collect::<Vec<_>>()));
        for (name, value) in own {
            put(name, json!(value));
        }
        put("anchors_per_sample", json!(blocks / samples.max(1) as f64));
        put("supervised_per_block", json!(ratio(drafts, blocks)));
        for (place, term) in TERMS.iter().enumerate().filter(|(_, term)| term.is_reported(recipe)) {
            // `insert` keeps the place of terms that were put above.
            put(&format!("{}_loss", term.name()), json!(mean(LossSum::Term(place))));
        }
        if recipe.dpace.is_some() {
            put("dpace_loss", json!(mean(LossSum::AdaptiveCe)));
        }
        if recipe.until_first_error {
            put("ce_until_first_error_loss", json!(mean(LossSum::AdaptiveCe)));
        }
        metrics
    }
}

/// `numerator / denominator`, or 0 if the denominator is 0.
pub(crate) fn ratio(numerator: f64, denominator: f64) -> f64 {
    if denominator > 0.0 { numerator / denominator } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sum_stands_once_and_is_found_there() {
        let (gamma, own) = (3, ["first", "second"]);
        let all: Vec<LossSum> = LossSum::all(gamma, &own).collect();
        let sums: Vec<f64> = (0..all.len()).map(|place| place as f64).collect();
        let window = LoggedSums { gamma, own: &own, sums: &sums };
        for (place, sum) in all.iter().enumerate() {
            assert_eq!(window.get(*sum), place as f64, "{}", sum.name());
        }
        assert_eq!([LossSum::CE.name(), LossSum::L1.name()], ["ce", "l1"]);
    }
}
