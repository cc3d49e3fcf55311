//! The training objective: losses of all logits, and the selector's among each slot's candidates.

use deepspec_ops::add_rows;
use deepspec_ops::distill_loss::{
    AuxLossOutput, Column, LossRecipe, RowObjective, Span, Supervised, distill_loss,
};
use tch::{Kind, Tensor};

use super::metrics::DFlash2Sum;
use super::model::DFlash2;
use super::selector::{Candidates, PathSelector};
use crate::block_common::{BlockBatch, sums};
use crate::draft_model::gradient;
use crate::{GradReadyHook, LossDenominator};

/// The cross entropy with the label among the candidates behind the true previous token. A label that is none of them is not learned.
struct SelectorLoss<'a> {
    selector: &'a PathSelector,
    batch: &'a BlockBatch,
    /// `[R, r]`.
    features: &'a Tensor,
    /// Where their gradients go, `[R, r]`.
    by_features: Tensor,
    /// Where those of B go, `[V, r]` float32; None where it does not learn.
    by_successors: Option<Tensor>,
    /// Its weight.
    alpha: f64,
    /// Factor on the gradients.
    scale: f64,
}

/// Columns of the [`SelectorLoss`]: its value, 0 where the label is no candidate.
const CE: Column = Column::Extra(0);
/// 1 where the label is a candidate.
const RECALLED: Column = Column::Extra(1);
/// The probability that what is drafted is accepted: Σ min(q, p^t) over the candidates.
const ACCEPT: Column = Column::Extra(2);

impl RowObjective for SelectorLoss<'_> {
    fn columns(&self) -> i64 {
        3
    }

    fn evaluate(&self, draft: &Tensor, target: &Tensor, span: &Span) -> AuxLossOutput {
        let features = span.of(self.features);
        let Candidates { tokens, successors, scores } = self.selector.candidates(draft, &features);
        let label = tokens.eq_tensor(&span.of(&self.batch.labels).unsqueeze(1)).to_kind(Kind::Float);
        let recalled = label.sum_dim_intlist(-1, true, Kind::Float);
        let log_q = scores.log_softmax(-1, Kind::Float);
        let (q, ce) = (log_q.exp(), -(&log_q * &label).sum_dim_intlist(-1, true, Kind::Float));
        let p = (target.gather(1, &tokens, false) - target.logsumexp(-1, true)).exp();
        let accept = q.minimum(&p).sum_dim_intlist(-1, true, Kind::Float);

        let weights = span.of(&self.batch.weights).unsqueeze(1) * self.alpha;
        let gradient = (q - label) * (&weights * &recalled * self.scale); // [n, k]
        let by_pairs = gradient.unsqueeze(1); // [n, 1, k]
        span.of(&self.by_features).copy_(&by_pairs.bmm(&successors).squeeze_dim(1));
        if let Some(sum) = &self.by_successors {
            let by_rows = gradient.unsqueeze(2) * features.to_kind(Kind::Float).unsqueeze(1); // [n, k, r]
            add_rows(sum, &tokens.flatten(0, 1), &by_rows.flatten(0, 1));
        }
        AuxLossOutput {
            columns: Tensor::cat(&[&ce, &recalled, &accept], 1),
            loss: ce * weights,
            tokens,
            gradient,
        }
    }
}

impl DFlash2 {
    /// Forward and backward of a batch: adds the gradients of all losses to those of the parameters, which must require them, and
    /// gives every [`DFlash2Sum`], `[K]` float64, detached.
    ///
    /// With weights w over the supervised drafts, every loss is Σ w·loss over the normaliser + 1e-6, that of the selector too, whose
    /// weight is `alpha`. As for other drafters, autograd sees the backbone and the selector's features only.
    pub fn accumulate(
        &self,
        batch: &BlockBatch,
        recipe: &LossRecipe,
        alpha: f64,
        normaliser: LossDenominator,
        listener: Option<GradReadyHook>,
    ) -> Tensor {
        let scale = normaliser.scale();
        let supervised = |tensor: &Tensor| tensor.flatten(0, 1).index_select(0, &batch.rows);
        let selector = &self.parts.selector;
        let (predecessors, successors) = selector.codebooks();
        let pass = self.pass(batch, listener.is_some());
        let hidden = &pass.hidden; // [A, γ, d]
        // A leaf, because few rows of A have a gradient: autograd would make one for all of them.
        let e = tch::no_grad(|| selector.embed(&batch.previous)).set_requires_grad(true);
        let features = supervised(&selector.features(hidden, &e)); // [R, r]
        let rows = supervised(hidden); // [R, d]
        let learns = successors.requires_grad();
        let loss = SelectorLoss {
            selector,
            batch,
            features: &features.detach(),
            by_features: features.zeros_like(),
            by_successors: learns.then(|| successors.zeros_like().to_kind(Kind::Float).detach()),
            alpha,
            scale,
        };
        let output = tch::no_grad(|| {
            let rows = Supervised {
                hidden: &rows,
                bias: None,
                teacher: &batch.teacher,
                sources: batch.sources(),
                labels: &batch.labels,
                weights: &batch.weights,
                slot_index: &batch.rows,
                counts: &batch.counts,
                gamma: self.config().blocks.drafted() as i64,
                scale,
                agreement: false,
                extra: Some(&loss),
            };
            distill_loss(&self.vocabulary().loss_head(), &rows, recipe)
        });
        let surrogate =
            (&rows * &output.hidden).sum(Kind::Float) + (&features * &loss.by_features).sum(Kind::Float);
        pass.backward(&surrogate, listener);
        tch::no_grad(|| {
            if let (true, Some(sums)) = (predecessors.requires_grad(), &batch.previous_sums) {
                sums.add(&gradient(predecessors), &e.grad().flatten(0, 1));
            }
            if let Some(sum) = &loss.by_successors {
                let mut gradient = gradient(successors);
                let _ = gradient.g_add_(&sum.to_kind(gradient.kind()));
            }
            let numerator = output.column(Column::Loss).sum(Kind::Double);
            let own = sums::joined(DFlash2Sum::OWN.into_iter().map(|sum| match sum {
                DFlash2Sum::Recalled => output.column(RECALLED).sum(Kind::Double),
                _ => batch.weighted(&output.column(CE)),
            }));
            Tensor::cat(&[batch.sums(&output, &numerator, &output.column(ACCEPT)), own], 0)
        })
    }
}
