//! The training objective of DSpark and DFlash: losses over supervised slots, their gradients and their statistics.

use deepspec_ops::distill_loss::{Bias, Column, LossOutput, LossRecipe, Supervised, distill_loss};
use tch::{Kind, Reduction, Tensor};

use super::heads::MarkovHead;
use super::kind::BlockObjective;
use super::model::Block;
use crate::block_common::{AnchoredSum, BlockBatch, sums};
use crate::draft_model::gradient;
use crate::{GradReadyHook, LossDenominator};

/// Sums of a micro-batch: those of all drafters of anchored blocks, and these drafters' own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockSum {
    /// What all have.
    Shared(AnchoredSum),
    /// The confidence's binary cross entropy with position weights.
    Confidence,
    /// Weighted |c − c*|.
    ConfidenceAbsError,
    /// Weighted c − c*.
    ConfidenceBias,
    /// Weighted Π c − Π c*.
    PrefixBias,
}

impl BlockSum {
    /// Those of these drafters alone, in the order in which they stand.
    pub const OWN: [Self; 4] =
        [Self::Confidence, Self::ConfidenceAbsError, Self::ConfidenceBias, Self::PrefixBias];

    /// All of them for blocks of γ drafts, in the order in which they stand.
    pub fn all(gamma: usize) -> impl Iterator<Item = Self> {
        AnchoredSum::all(gamma).map(Self::Shared).chain(Self::OWN)
    }

    /// Its name, for messages and tests.
    pub fn name(self) -> String {
        match self {
            Self::Shared(sum) => sum.name(),
            Self::Confidence => "confidence".into(),
            Self::ConfidenceAbsError => "confidence_abs_error".into(),
            Self::ConfidenceBias => "confidence_bias".into(),
            Self::PrefixBias => "prefix_bias".into(),
        }
    }
}

impl Block {
    /// Forward and backward of a batch: adds the gradients of all losses to those of the parameters, which must require them,
    /// and gives every [`BlockSum`], `[K]` float64, detached.
    ///
    /// With weights w over the supervised slots, every loss of `objective` is Σ w·loss over the normaliser + 1e-6. The
    /// confidence's is the BCE against c* = clamp(1 − ½‖p^d − p^t‖₁, 0, 1). p^t and c* are constants.
    ///
    /// Autograd sees the backbone and the small heads only. What lies behind the final states is differentiated in closed form,
    /// and one backward through Σ state · gradient carries it on.
    ///
    /// `listener` hears of the stages of [`TrainableDrafter`](crate::TrainableDrafter).
    pub fn accumulate(
        &self,
        batch: &BlockBatch,
        objective: &BlockObjective,
        normaliser: LossDenominator,
        listener: Option<GradReadyHook>,
    ) -> Tensor {
        let scale = normaliser.scale();
        let supervised = |tensor: &Tensor| tensor.flatten(0, 1).index_select(0, &batch.rows);
        let pass = self.pass(batch, listener.is_some());
        let hidden = &pass.hidden; // [A, γ, d]
        // A leaf, because few rows of W1 have a gradient: autograd would make one for all of them.
        let e = self.parts.markov.as_ref().map(|markov| {
            let e = tch::no_grad(|| markov.embed(&batch.previous));
            e.set_requires_grad(true)
        });
        let features = self.parts.markov.as_ref().zip(e.as_ref()).map(|(markov, e)| {
            supervised(&markov.features(hidden, e)) // [R, r]
        });
        let rows = supervised(hidden); // [R, d]
        let output =
            tch::no_grad(|| self.head_losses(batch, &rows, features.as_ref(), &objective.loss, scale));
        let accept = (output.column(Column::L1) * -0.5 + 1.0).clamp(0.0, 1.0);

        let mut surrogate = (&rows * &output.hidden).sum(Kind::Float);
        if let Some((features, by_features)) = features.as_ref().zip(output.features.as_ref()) {
            surrogate += (features * by_features).sum(Kind::Float);
        }
        let confidence_logits = self.confidence_logits(&rows, e.as_ref().map(&supervised).as_ref());
        let bce = confidence_logits.as_ref().map(|logits| batch.weighted(&confidence_loss(logits, &accept)));
        if let Some(bce) = &bce {
            surrogate += bce * (objective.confidence_alpha * scale);
        }
        pass.backward(&surrogate, listener);
        tch::no_grad(|| {
            let markov = self.parts.markov.as_ref().filter(|markov| markov.w1().requires_grad());
            if let (Some(markov), Some(e), Some(sums)) = (markov, e, &batch.previous_sums) {
                sums.add(&gradient(markov.w1()), &e.grad().flatten(0, 1));
            }
            let bce = bce.map(|bce| bce.detach() * objective.confidence_alpha);
            let mut loss = output.column(Column::Loss).sum(Kind::Double);
            if let Some(bce) = &bce {
                loss += bce;
            }
            let own = Self::confidence_sums(batch, &accept, confidence_logits.as_ref());
            Tensor::cat(&[batch.sums(&output, &loss, &accept), own], 0)
        })
    }

    /// Losses behind the final states `rows [R, d]`, without a graph; W2's gradient is added where it belongs.
    fn head_losses(
        &self,
        batch: &BlockBatch,
        rows: &Tensor,
        features: Option<&Tensor>,
        loss: &LossRecipe,
        scale: f64,
    ) -> LossOutput {
        let markov_w2 = self.parts.markov.as_ref().map(|markov| markov.w2().stored());
        let w2 = markov_w2.as_ref().filter(|w2| w2.requires_grad()).map(|w2| {
            let gradient = gradient(w2);
            // Sums of many chunks would be rounded often in a narrower kind.
            let sum = match gradient.kind() {
                Kind::Float => gradient.shallow_clone(),
                _ => gradient.zeros_like().to_kind(Kind::Float),
            };
            (gradient, sum)
        });
        let reads_previous_alone = self.parts.markov.as_ref().is_some_and(MarkovHead::reads_previous_alone);
        let alike = reads_previous_alone.then_some(&batch.tokens_before[..]);
        let bias = markov_w2.as_ref().zip(features).map(|(markov_w2, features)| {
            let w2_gradient = w2.as_ref().map(|(_, sum)| sum);
            Bias { features, alike, w2: markov_w2, w2_gradient }
        });
        let supervised = Supervised {
            hidden: rows,
            bias,
            teacher: &batch.teacher,
            sources: batch.sources(),
            labels: &batch.labels,
            weights: &batch.weights,
            slot_index: &batch.rows,
            counts: &batch.counts,
            gamma: self.config().blocks.drafted() as i64,
            scale,
            agreement: false,
            extra: None,
        };
        let output = distill_loss(&self.vocabulary().loss_head(), &supervised, loss);
        if let Some((mut gradient, sum)) = w2.filter(|(gradient, _)| gradient.kind() != Kind::Float) {
            let _ = gradient.g_add_(&sum.to_kind(gradient.kind()));
        }
        output
    }

    /// [`BlockSum::OWN`], `[4]` float64; 0 without a confidence head. `accept [R]` are the accept rates.
    fn confidence_sums(batch: &BlockBatch, accept: &Tensor, logits: Option<&Tensor>) -> Tensor {
        let Some(logits) = logits else {
            return Tensor::zeros([BlockSum::OWN.len() as i64], (Kind::Double, accept.device()));
        };
        let confidence = logits.sigmoid();
        let error = &confidence - accept;
        let survival = |rates: &Tensor| batch.by_block(rates).cumprod(1, Kind::Float);
        let prefix = (survival(&confidence) - survival(accept)) * batch.by_block(&batch.weights);
        sums::joined(BlockSum::OWN.into_iter().map(|sum| match sum {
            BlockSum::Confidence => batch.weighted(&confidence_loss(logits, accept)),
            BlockSum::ConfidenceAbsError => batch.weighted(&error.abs()),
            BlockSum::ConfidenceBias => batch.weighted(&error),
            _ => prefix.sum(Kind::Float),
        }))
    }
}

/// The binary cross entropy of confidence logits against accept rates, `[R]`.
fn confidence_loss(logits: &Tensor, accept: &Tensor) -> Tensor {
    let none = None::<&Tensor>;
    logits.binary_cross_entropy_with_logits(accept, none, none, Reduction::None)
}
