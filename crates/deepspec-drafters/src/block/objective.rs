//! The training objective of DSpark and DFlash: losses over supervised slots, their gradients and their statistics.

use tch::{Kind, Reduction, Tensor};

use super::batch::BlockBatch;
use super::model::Block;
use crate::Normaliser;
use crate::losses::{self, Bias, Column, LossAlphas, Outcome, Supervised};

/// Added to every denominator.
const DENOMINATOR_EPS: f64 = 1e-6;

/// What a micro-batch leaves behind: sums that add over micro-batches and ranks.
pub struct LossSums;

impl LossSums {
    /// What each sum is; the last 2γ are Σ accept rate and count per position. `loss` is the numerator of all that is learned,
    /// those of single losses have position weights only.
    pub fn names(block_size: usize) -> Vec<String> {
        let fixed = [
            "weight",
            "loss",
            "ce",
            "l1",
            "soft_ce",
            "kl",
            "lk",
            "dpace",
            "confidence",
            "tau",
            "blocks",
            "slots",
            "confidence_abs_error",
            "confidence_bias",
            "prefix_bias",
        ];
        let per_position = ["accept", "count"]
            .into_iter()
            .flat_map(|name| (0..block_size).map(move |k| format!("{name}@{k}")));
        fixed.into_iter().map(str::to_string).chain(per_position).collect()
    }
}

impl Block {
    /// Forward and backward of a batch: adds the gradients of all losses to those of the parameters, which must require them,
    /// and gives the sums of [`LossSums::names`], `[K]` float64, detached.
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
        let outcome = tch::no_grad(|| self.head_losses(batch, &rows, features.as_ref(), alphas, scale));
        let accept = (outcome.column(Column::L1) * -0.5 + 1.0).clamp(0.0, 1.0);

        let mut surrogate = (&rows * &outcome.hidden).sum(Kind::Float);
        if let Some((features, by_features)) = features.as_ref().zip(outcome.features.as_ref()) {
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
            self.sums(batch, alphas, &outcome, &accept, confidence_logits.as_ref().zip(bce.as_ref()))
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
    ) -> Outcome {
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
            places: &batch.rows,
            counts: &batch.counts,
            gamma: self.config().block_size as i64,
            scale,
        };
        let outcome = losses::accumulate(self.vocabulary(), &supervised, alphas);
        if let Some((mut gradient, sum)) = w2.filter(|(gradient, _)| gradient.kind() != Kind::Float) {
            let _ = gradient.g_add_(&sum.to_kind(gradient.kind()));
        }
        outcome
    }

    /// The sums by name. `accept [R]` are the accept rates, `confidence` logits and loss of that head.
    fn sums(
        &self,
        batch: &BlockBatch,
        alphas: &LossAlphas,
        outcome: &Outcome,
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
        let column = |column: Column| outcome.column(column);
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
        // Filled where it is needed: a number of the host's would have to travel.
        let number = |value: f64| Tensor::full([], value, (Kind::Double, device));
        let scalars = [
            batch.weights.sum(Kind::Float),
            column(Column::Loss).sum(Kind::Double) + &bce * alphas.confidence,
            weighted(&column(Column::Ce)),
            weighted(&column(Column::L1)),
            weighted(&column(Column::SoftCe)),
            weighted(&column(Column::Kl)),
            weighted(&column(Column::Lk)),
            column(Column::Dpace).sum(Kind::Float),
            bce,
            survival.sum(Kind::Double) + batch.blocks as f64,
            number(batch.blocks as f64),
            number(count),
            abs_error,
            bias,
            prefix_bias,
        ];
        let scalars = scalars.iter().map(|sum| sum.to_kind(Kind::Double).reshape([1]));
        let per_position = |by_block: &Tensor| by_block.sum_dim_intlist(0, false, Kind::Double);
        let positions = [per_position(&accepted), per_position(&by_block(&accept.ones_like()))];
        Tensor::cat(&scalars.chain(positions).collect::<Vec<_>>(), 0)
    }
}
