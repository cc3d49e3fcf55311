//! The training objective of DSpark and DFlash: losses over supervised slots, their gradients and their statistics.

use tch::{Kind, Reduction, Tensor};

use super::batch::BlockBatch;
use super::model::Block;
use crate::Normaliser;
use crate::losses::{self, Bias, Column, LossAlphas, LossOutput, Supervised, TERMS};

/// Added to every denominator.
const DENOMINATOR_EPS: f64 = 1e-6;

/// What a micro-batch leaves behind: sums that add over micro-batches and ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockSum {
    /// Σ of the position weights.
    Weight,
    /// The numerator of all that is learned.
    Loss,
    /// A row loss with position weights only: one of the table of terms.
    Term(usize),
    /// The label's cross entropy with D-PACE's weights.
    Dpace,
    /// The confidence's binary cross entropy with position weights.
    Confidence,
    /// Σ 1 + Π accept rate over the blocks.
    Tau,
    /// Blocks.
    Blocks,
    /// Supervised slots.
    Slots,
    /// Weighted |c − c*|.
    ConfidenceAbsError,
    /// Weighted c − c*.
    ConfidenceBias,
    /// Weighted Π c − Π c*.
    PrefixBias,
    /// Σ accept rate at a position.
    Accept(usize),
    /// Supervised slots at a position.
    Count(usize),
}

impl BlockSum {
    /// The label's cross entropy.
    pub const CE: Self = Self::Term(0);
    /// ‖p^d − p^t‖₁.
    pub const L1: Self = Self::Term(1);

    /// All of them for blocks of γ positions, in the order in which they stand.
    pub fn all(block_size: usize) -> impl Iterator<Item = Self> {
        let terms = (0..TERMS.len()).map(Self::Term);
        [Self::Weight, Self::Loss]
            .into_iter()
            .chain(terms)
            .chain([
                Self::Dpace,
                Self::Confidence,
                Self::Tau,
                Self::Blocks,
                Self::Slots,
                Self::ConfidenceAbsError,
                Self::ConfidenceBias,
                Self::PrefixBias,
            ])
            .chain((0..block_size).map(Self::Accept))
            .chain((0..block_size).map(Self::Count))
    }

    /// Where it stands among those of blocks of γ positions.
    pub fn place(self, block_size: usize) -> usize {
        Self::all(block_size).take_while(|other| *other != self).count()
    }

    /// Its name, for messages and tests.
    pub fn name(self) -> String {
        match self {
            Self::Weight => "weight".into(),
            Self::Loss => "loss".into(),
            Self::Term(term) => TERMS[term].name().into(),
            Self::Dpace => "dpace".into(),
            Self::Confidence => "confidence".into(),
            Self::Tau => "tau".into(),
            Self::Blocks => "blocks".into(),
            Self::Slots => "slots".into(),
            Self::ConfidenceAbsError => "confidence_abs_error".into(),
            Self::ConfidenceBias => "confidence_bias".into(),
            Self::PrefixBias => "prefix_bias".into(),
            Self::Accept(position) => format!("accept@{position}"),
            Self::Count(position) => format!("count@{position}"),
        }
    }
}

impl Block {
    /// Forward and backward of a batch: adds the gradients of all losses to those of the parameters, which must require them,
    /// and gives every [`BlockSum`], `[K]` float64, detached.
    ///
    /// With weights w over the supervised slots, every loss of `alphas` is Σ w·loss over the normaliser + 1e-6. The
    /// confidence's is the BCE against c* = clamp(1 − ½‖p^d − p^t‖₁, 0, 1). p^t and c* are constants.
    ///
    /// Autograd sees the backbone and the small heads only. What lies behind the final states is differentiated in closed form,
    /// and one backward through Σ state · gradient carries it on.
    pub fn accumulate(&self, batch: &BlockBatch, alphas: &LossAlphas, normaliser: Normaliser) -> Tensor {
        let scale = 1.0 / (normaliser.0 + DENOMINATOR_EPS);
        let supervised = |tensor: &Tensor| tensor.flatten(0, 1).index_select(0, &batch.rows);
        let hidden = self.hidden(batch); // [A, γ, d]
        // A leaf, because few rows of W1 have a gradient: autograd would make one for all of them.
        let e = self.parts.markov.as_ref().map(|markov| {
            let e = tch::no_grad(|| markov.embed(&batch.previous));
            e.set_requires_grad(true)
        });
        let features = self.parts.markov.as_ref().zip(e.as_ref()).map(|(markov, e)| {
            supervised(&markov.features(&hidden, e)) // [R, r]
        });
        let rows = supervised(&hidden); // [R, d]
        let output = tch::no_grad(|| self.head_losses(batch, &rows, features.as_ref(), alphas, scale));
        let accept = (output.column(Column::L1) * -0.5 + 1.0).clamp(0.0, 1.0);

        let mut surrogate = (&rows * &output.hidden).sum(Kind::Float);
        if let Some((features, by_features)) = features.as_ref().zip(output.features.as_ref()) {
            surrogate += (features * by_features).sum(Kind::Float);
        }
        let confidence_logits = self.confidence_logits(&rows, e.as_ref().map(&supervised).as_ref());
        let bce = confidence_logits.as_ref().map(|logits| {
            let none = None::<&Tensor>;
            let bce = logits.binary_cross_entropy_with_logits(&accept, none, none, Reduction::None);
            (bce * &batch.weights).sum(Kind::Float)
        });
        if let Some(bce) = &bce {
            surrogate += bce * (alphas.confidence * scale);
        }
        surrogate.backward();
        tch::no_grad(|| {
            let markov = self.parts.markov.as_ref().filter(|markov| markov.w1().requires_grad());
            if let (Some(markov), Some(e), Some(sums)) = (markov, e, &batch.previous_sums) {
                sums.add(&losses::gradient(markov.w1()), &e.grad().flatten(0, 1));
            }
            self.sums(batch, alphas, &output, &accept, confidence_logits.as_ref().zip(bce.as_ref()))
        })
    }

    /// Losses behind the final states `rows [R, d]`, without a graph; W2's gradient is added where it belongs.
    fn head_losses(
        &self,
        batch: &BlockBatch,
        rows: &Tensor,
        features: Option<&Tensor>,
        alphas: &LossAlphas,
        scale: f64,
    ) -> LossOutput {
        let w2 = self.parts.markov.as_ref().filter(|markov| markov.w2().requires_grad()).map(|markov| {
            let gradient = losses::gradient(markov.w2());
            // Sums of many chunks would be rounded often in a narrower kind.
            let sum = match gradient.kind() {
                Kind::Float => gradient.shallow_clone(),
                _ => gradient.zeros_like().to_kind(Kind::Float),
            };
            (gradient, sum)
        });
        let bias = self.parts.markov.as_ref().zip(features).map(|(markov, features)| {
            let w2_gradient = w2.as_ref().map(|(_, sum)| sum);
            Bias { features, w2: markov.w2(), w2_gradient }
        });
        let supervised = Supervised {
            hidden: rows,
            bias,
            teacher: &batch.teacher,
            labels: &batch.labels,
            weights: &batch.weights,
            slot_index: &batch.rows,
            counts: &batch.counts,
            gamma: self.config().block_size as i64,
            scale,
            agreement: false,
        };
        let output = losses::accumulate(self.vocabulary(), &supervised, alphas);
        if let Some((mut gradient, sum)) = w2.filter(|(gradient, _)| gradient.kind() != Kind::Float) {
            let _ = gradient.g_add_(&sum.to_kind(gradient.kind()));
        }
        output
    }

    /// The sums by name. `accept [R]` are the accept rates, `confidence` logits and loss of that head.
    fn sums(
        &self,
        batch: &BlockBatch,
        alphas: &LossAlphas,
        output: &LossOutput,
        accept: &Tensor,
        confidence: Option<(&Tensor, &Tensor)>,
    ) -> Tensor {
        let gamma = self.config().block_size as i64;
        let (device, count) = (accept.device(), accept.size()[0] as f64);
        let by_block = |rows: &Tensor| {
            let all = Tensor::zeros([batch.blocks as i64 * gamma], (Kind::Float, device));
            all.index_add(0, &batch.rows, rows).view([-1, gamma])
        };
        let weighted = |values: &Tensor| (values * &batch.weights).sum(Kind::Float);
        let accepted = by_block(accept);
        let survival = accepted.cumprod(1, Kind::Float); // Π accept rate · eval_mask
        let zero = Tensor::zeros([], (Kind::Float, device));
        let (bce, abs_error, bias, prefix_bias) = match confidence {
            Some((logits, bce)) => {
                let confidence = logits.sigmoid();
                let error = &confidence - accept;
                let prefix =
                    (by_block(&confidence).cumprod(1, Kind::Float) - &survival) * by_block(&batch.weights);
                (bce.detach(), weighted(&error.abs()), weighted(&error), prefix.sum(Kind::Float))
            }
            None => (zero.copy(), zero.copy(), zero.copy(), zero),
        };
        let accepted_at = accepted.sum_dim_intlist(0, false, Kind::Double);
        let supervised_at = by_block(&accept.ones_like()).sum_dim_intlist(0, false, Kind::Double);
        // Filled where it is needed: a number of the host's would have to travel.
        let number = |value: f64| Tensor::full([], value, (Kind::Double, device));
        let value = |sum: BlockSum| match sum {
            BlockSum::Weight => batch.weights.sum(Kind::Float),
            BlockSum::Loss => output.column(Column::Loss).sum(Kind::Double) + &bce * alphas.confidence,
            BlockSum::Term(term) => weighted(&output.column(Column::Term(term))),
            BlockSum::Dpace => output.column(Column::Dpace).sum(Kind::Float),
            BlockSum::Confidence => bce.shallow_clone(),
            BlockSum::Tau => survival.sum(Kind::Double) + batch.blocks as f64,
            BlockSum::Blocks => number(batch.blocks as f64),
            BlockSum::Slots => number(count),
            BlockSum::ConfidenceAbsError => abs_error.shallow_clone(),
            BlockSum::ConfidenceBias => bias.shallow_clone(),
            BlockSum::PrefixBias => prefix_bias.shallow_clone(),
            BlockSum::Accept(position) => accepted_at.get(position as i64),
            BlockSum::Count(position) => supervised_at.get(position as i64),
        };
        let sums = BlockSum::all(gamma as usize).map(|sum| value(sum).to_kind(Kind::Double).reshape([1]));
        Tensor::cat(&sums.collect::<Vec<_>>(), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_that_are_named_here_are_the_terms_of_that_name() {
        assert_eq!((BlockSum::CE.name().as_str(), BlockSum::L1.name().as_str()), ("ce", "l1"));
        assert_eq!(BlockSum::Count(6).place(7) + 1, BlockSum::all(7).count());
    }
}
