//! Rows of a chunk's logits: their losses, and the gradients that take the logits' place.

use tch::{Kind, Tensor};

use super::inputs::{AuxLossOutput, LossHead, Supervised};
use super::recipe::LossRecipe;
use super::rows::{Rows, Target};
use super::span::Span;
use super::terms::{GradCoeffs, RowStats, TERMS, WeightedLoss};
use crate::ffi::{LogitRows, RowsMeasured, TargetProbs};

/// A tile of the buffers, in the kind of the weights.
pub(super) struct Logits {
    pub base: Tensor,
    /// Where it is not added to the base already.
    pub bias: Option<Tensor>,
    /// Of the rows, or of all sources.
    pub target: Tensor,
    /// Of the target's rows, where `target` already is probabilities.
    pub entropies: Option<Tensor>,
    /// Each row's source, where `target` is of all sources.
    pub source_of_row: Option<Tensor>,
}

impl Logits {
    /// The columns of the tile, whose rows are `span` of all. Leaves the gradients in place of the logits: by the bias
    /// where there is one, and by the base where it has none of its own or is soft-capped.
    pub fn differentiate(
        self,
        head: &LossHead,
        rows: &Supervised,
        span: &Span,
        recipe: &LossRecipe,
    ) -> Tensor {
        if let Some(found) = self.differentiate_where_they_lie(head, rows, span, recipe) {
            return found;
        }
        let Self { base, bias, target, entropies, source_of_row } = self;
        let capped = head.cap(base.to_kind(Kind::Float));
        let slope = head.softcap.map(|cap| 1.0 - (&capped / cap).square());
        let draft = match &bias {
            Some(bias) => bias.to_kind(Kind::Float).g_add_(&capped),
            None => capped,
        };
        let mut extra = None;
        let target = match entropies {
            Some(entropies) => {
                Target::Weighed(TargetProbs { probabilities: target, entropies, source_of_row })
            }
            None => {
                let of_rows = |of: &Tensor| match &source_of_row {
                    Some(of_row) => of.index_select(0, of_row),
                    None => of.shallow_clone(),
                };
                let target = head.cap(of_rows(&target).to_kind(Kind::Float));
                extra = rows.extra.map(|extra| extra.evaluate(&draft, &target, span));
                Target::Logits(target)
            }
        };
        let needs = rows.needs(recipe);
        let (rows_of, distances) = Rows::measure(draft, target, &span.of(rows.labels), needs);
        let mut judged = TileLoss::of(distances, rows, span, recipe);
        let mut gradient = rows_of.gradient(&std::mem::take(&mut judged.coeffs).scaled(rows.scale));
        if let Some(extra) = &extra {
            let _ = gradient.scatter_add_(1, &extra.tokens, &extra.gradient);
            judged.loss += &extra.loss;
        }
        let by_base = slope.map(|slope| &gradient * slope);
        match bias {
            Some(bias) => {
                put(bias, &gradient);
                if let Some(by_base) = &by_base {
                    put(base, by_base);
                }
            }
            None => put(base, by_base.as_ref().unwrap_or(&gradient)),
        }
        judged.columns(extra)
    }

    /// The same on a GPU, for logits that stay in bfloat16; None where there are no kernels for it.
    fn differentiate_where_they_lie(
        &self,
        head: &LossHead,
        rows: &Supervised,
        span: &Span,
        recipe: &LossRecipe,
    ) -> Option<Tensor> {
        if rows.extra.is_some() || self.entropies.is_some() {
            return None;
        }
        let labels = span.of(rows.labels);
        let logits = LogitRows {
            base: &self.base,
            bias: self.bias.as_ref(),
            target: &self.target,
            source_of_row: self.source_of_row.as_ref(),
            labels: &labels,
            cap: head.softcap,
        };
        let measured = logits.measure()?;
        let (needs, RowsMeasured { ce, l1, overlap, soft }) = (rows.needs(recipe), measured.distances());
        let agreement = needs.agreement.then(|| measured.agreement());
        let soft = soft.filter(|_| needs.soft);
        let distances = RowStats { ce, l1, soft, overlap: Some(overlap), agreement };
        let mut judged = TileLoss::of(distances, rows, span, recipe);
        logits.slope(&measured, &std::mem::take(&mut judged.coeffs).scaled(rows.scale).factors(&labels));
        Some(judged.columns(None))
    }
}

/// The losses of measured rows.
struct TileLoss {
    distances: RowStats,
    terms: [Option<Tensor>; TERMS.len()],
    loss: Tensor,
    coeffs: GradCoeffs,
    /// D-PACE's weights.
    paced: Option<Tensor>,
}

impl TileLoss {
    fn of(distances: RowStats, rows: &Supervised, span: &Span, recipe: &LossRecipe) -> Self {
        let weights = span.of(rows.weights).unsqueeze(1);
        let paced = recipe.dpace.map(|dpace| {
            let slots = span.of(rows.slot_index) - span.first_block as i64 * rows.gamma;
            LossRecipe::dpace_weights(dpace, &distances.ce, &slots, span.blocks as i64, rows.gamma)
        });
        let WeightedLoss { terms, loss, coeffs } =
            recipe.evaluate(&distances, &weights, paced.as_ref().unwrap_or(&weights));
        Self { distances, terms, loss, coeffs, paced }
    }

    /// The columns.
    fn columns(self, extra: Option<AuxLossOutput>) -> Tensor {
        let Self { distances: RowStats { ce, agreement, .. }, terms, loss, paced, .. } = self;
        let paced = paced.map(|paced| &ce * paced);
        let zero = ce.zeros_like();
        let none = || zero.shallow_clone();
        let columns = terms.into_iter().chain([paced, Some(loss), agreement]);
        let columns = columns.map(|column| column.unwrap_or_else(none));
        Tensor::cat(&columns.chain(extra.map(|extra| extra.columns)).collect::<Vec<_>>(), 1)
    }
}

/// Copies values to their place, where they are not made in it.
fn put(mut place: Tensor, values: &Tensor) {
    if place.data_ptr() != values.data_ptr() {
        place.copy_(values);
    }
}
