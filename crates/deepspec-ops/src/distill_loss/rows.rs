//! Tiles of logits: losses of the drafter against label and target, and gradients that overwrite the logits.

use tch::{Kind, Tensor};

use super::block_verification::{BlockRows, BlockVerificationLoss, block_verification_loss};
use super::inputs::{AuxLossOutput, LossHead, SupervisedRows};
use super::recipe::LossRecipe;
use super::reference;
use super::span::BlockSpan;
use super::terms::{GradCoeffs, RequiredStats, RowStats, TERMS, WeightedLoss};
use crate::argmax;
use crate::ffi::{LogitRows, TargetProbs, logits_grad, measure_rows, softmax_targets};

/// A tile of the logit buffers, in the dtype of the weights.
pub(super) struct LogitsTile {
    /// Logits of the LM head.
    pub base: Tensor,
    /// Bias that is added to the logits. None without a bias, or if `base` already includes them.
    pub bias: Option<Tensor>,
    /// Target logits or probabilities, one per row or per target state.
    pub target: Tensor,
    /// Target entropies, if `target` holds probabilities.
    pub entropies: Option<Tensor>,
    /// Index of each row's target state, if `target` holds all states.
    pub source_of_row: Option<Tensor>,
}

impl LogitsTile {
    /// Returns the measurements of the tile, whose rows are `span` of all rows. Gradients overwrite the bias if there
    /// is one, and the base without a bias or with a soft-cap.
    pub fn backward_in_place(
        self,
        head: &LossHead,
        rows: &SupervisedRows,
        span: &BlockSpan,
        recipe: &LossRecipe,
    ) -> Tensor {
        if let Some(argmax) = rows.argmax {
            span.slice_rows(argmax).copy_(&self.draft_argmax(head));
        }
        if let Some(found) = self.fused_backward_in_place(head, rows, span, recipe) {
            return found;
        }
        let Self { base, bias, target, entropies, source_of_row } = self;
        let capped = head.apply_softcap(base.to_kind(Kind::Float));
        let slope = head.softcap.map(|cap| 1.0 - (&capped / cap).square());
        let draft = match &bias {
            Some(bias) => bias.to_kind(Kind::Float).g_add_(&capped),
            None => capped,
        };
        let (mut extra, mut block_verification) = (None, None);
        let target = match entropies {
            Some(entropies) => {
                TargetRows::Probabilities(TargetProbs { probabilities: target, entropies, source_of_row })
            }
            None => {
                let of_rows = |of: &Tensor| match &source_of_row {
                    Some(of_row) => of.index_select(0, of_row),
                    None => of.shallow_clone(),
                };
                let target = head.apply_softcap(of_rows(&target).to_kind(Kind::Float));
                extra = rows.extra.map(|extra| extra.evaluate(&draft, &target, span));
                block_verification = block_verification_of(rows, span, recipe, &draft, &target);
                TargetRows::Logits(target)
            }
        };
        let needs = rows.required_stats(recipe);
        let (rows_of, mut distances) =
            MeasuredRows::measure(draft, target, &span.slice_rows(rows.labels), needs);
        let block_gradient = block_verification.map(|BlockVerificationLoss { value, gradient }| {
            distances.block_verification = Some(value);
            gradient
        });
        let mut judged = TileLoss::evaluate(distances, rows, span, recipe);
        let mut gradient = rows_of.into_gradient(&std::mem::take(&mut judged.coeffs).scaled(rows.scale));
        if let Some((block_gradient, bv)) = block_gradient.zip(recipe.block_verification) {
            gradient += block_gradient * (bv.alpha * rows.scale);
        }
        if let Some(extra) = &extra {
            let _ = gradient.scatter_add_(1, &extra.tokens, &extra.gradient);
            judged.loss += &extra.loss;
        }
        let by_base = slope.map(|slope| &gradient * slope);
        match bias {
            Some(bias) => {
                copy_unless_aliased(bias, &gradient);
                if let Some(by_base) = &by_base {
                    copy_unless_aliased(base, by_base);
                }
            }
            None => copy_unless_aliased(base, by_base.as_ref().unwrap_or(&gradient)),
        }
        judged.cat_columns(extra)
    }

    /// The drafter's argmax of each row, `[n]`.
    fn draft_argmax(&self, head: &LossHead) -> Tensor {
        let capped = head.apply_softcap(self.base.to_kind(Kind::Float));
        match &self.bias {
            Some(bias) => argmax(&(capped + bias.to_kind(Kind::Float))),
            None => argmax(&capped),
        }
    }

    /// Measurements and gradients by the GPU kernels for bfloat16 logits; None if no kernel applies.
    fn fused_backward_in_place(
        &self,
        head: &LossHead,
        rows: &SupervisedRows,
        span: &BlockSpan,
        recipe: &LossRecipe,
    ) -> Option<Tensor> {
        let needs = rows.required_stats(recipe);
        // The kernels return neither the drafter's argmax nor whole rows of log probabilities.
        if rows.extra.is_some() || self.entropies.is_some() || needs.correct || needs.block_verification {
            return None;
        }
        let labels = span.slice_rows(rows.labels);
        let logits = LogitRows {
            base: &self.base,
            bias: self.bias.as_ref(),
            target: &self.target,
            source_of_row: self.source_of_row.as_ref(),
            labels: &labels,
            cap: head.softcap,
        };
        let measured = logits.measure()?;
        let agreement = needs.agreement.then(|| measured.agreement());
        let distances = RowStats::from_kernel(measured.distances(), agreement, needs);
        let mut judged = TileLoss::evaluate(distances, rows, span, recipe);
        logits.backward(&measured, &std::mem::take(&mut judged.coeffs).scaled(rows.scale).to_tensor(&labels));
        Some(judged.cat_columns(None))
    }
}

/// Loss of block verification of the blocks of `span`; None if the recipe has none.
fn block_verification_of(
    rows: &SupervisedRows,
    span: &BlockSpan,
    recipe: &LossRecipe,
    draft: &Tensor,
    target: &Tensor,
) -> Option<BlockVerificationLoss> {
    let beta = recipe.block_verification?.beta;
    let blocks = BlockRows {
        labels: &span.slice_rows(rows.labels),
        weights: &span.slice_rows(rows.weights),
        slots: &span.slots_of_rows(rows),
        blocks: span.blocks as i64,
        gamma: rows.gamma,
    };
    Some(block_verification_loss(draft, target, &blocks, beta))
}

/// Losses of measured rows.
struct TileLoss {
    distances: RowStats,
    terms: [Option<Tensor>; TERMS.len()],
    loss: Tensor,
    coeffs: GradCoeffs,
    /// Cross entropy weights that follow the drafter.
    adaptive: Option<Tensor>,
}

impl TileLoss {
    fn evaluate(distances: RowStats, rows: &SupervisedRows, span: &BlockSpan, recipe: &LossRecipe) -> Self {
        let weights = span.slice_rows(rows.weights).unsqueeze(1);
        let slots = || span.slots_of_rows(rows);
        let adaptive =
            recipe.adaptive_ce_weights(&distances, &weights, slots, span.blocks as i64, rows.gamma);
        let WeightedLoss { terms, loss, coeffs } =
            recipe.evaluate(&distances, &weights, adaptive.as_ref().unwrap_or(&weights));
        Self { distances, terms, loss, coeffs, adaptive }
    }

    /// Concatenates all measurements, one column each.
    fn cat_columns(self, extra: Option<AuxLossOutput>) -> Tensor {
        let Self { distances: RowStats { ce, agreement, .. }, terms, loss, adaptive, .. } = self;
        let adaptive = adaptive.map(|adaptive| &ce * adaptive);
        let zero = ce.zeros_like();
        let none = || zero.shallow_clone();
        let columns = terms.into_iter().chain([adaptive, Some(loss), agreement]);
        let columns = columns.map(|column| column.unwrap_or_else(none));
        Tensor::cat(&columns.chain(extra.map(|extra| extra.columns)).collect::<Vec<_>>(), 1)
    }
}

/// Copies `values` to `place`, unless both share memory.
fn copy_unless_aliased(mut place: Tensor, values: &Tensor) {
    if place.data_ptr() != values.data_ptr() {
        place.copy_(values);
    }
}

/// Target logits or probabilities of some rows.
enum TargetRows {
    /// Logits of each row, `[n, V]` float32.
    Logits(Tensor),
    /// Probabilities, which several rows may share.
    Probabilities(TargetProbs),
}

/// Measured rows. Computing the gradient consumes them.
enum MeasuredRows {
    /// A kernel's result: drafter probabilities p^d `[n, V]` float32, target probabilities, and labels `[n, 1]`.
    Kernel {
        draft: Tensor,
        target: TargetProbs,
        labels: Tensor,
    },
    Reference(reference::RowProbs),
}

impl MeasuredRows {
    /// Turns the drafter's float32 logits `[n, V]` into probabilities in place, and compares them with target and
    /// `labels [n]`.
    fn measure(draft: Tensor, target: TargetRows, labels: &Tensor, needs: RequiredStats) -> (Self, RowStats) {
        let labels = labels.unsqueeze(1);
        let correct = needs.correct.then(|| draft.argmax(-1, true).eq_tensor(&labels).to_kind(Kind::Float));
        let mut target = match target {
            TargetRows::Probabilities(target) => {
                assert!(!needs.agreement, "the argmax of a target is unknown once it is a distribution");
                let (rows, stats) = Self::measure_by_kernel(draft, target, labels, needs);
                return (rows, RowStats { correct, ..stats });
            }
            TargetRows::Logits(target) => target,
        };
        let agreement = needs.agreement.then(|| {
            let same = draft.argmax(-1, true).eq_tensor(&target.argmax(-1, true));
            same.to_kind(Kind::Float)
        });
        let (rows, stats) = match softmax_targets(&mut target, needs.soft) {
            Some(entropies) => {
                let target = TargetProbs { probabilities: target, entropies, source_of_row: None };
                Self::measure_by_kernel(draft, target, labels, needs)
            }
            None => {
                let (measured, stats) = reference::measure(draft, target, labels, needs);
                (Self::Reference(measured), stats)
            }
        };
        (rows, RowStats { agreement, correct, ..stats })
    }

    fn measure_by_kernel(
        mut draft: Tensor,
        target: TargetProbs,
        labels: Tensor,
        needs: RequiredStats,
    ) -> (Self, RowStats) {
        let measured = measure_rows(&mut draft, &target, &labels, needs.soft);
        let Some(found) = measured else {
            panic!("no memory for rows {:?}, or they do not fit {target:?}", draft.size());
        };
        (Self::Kernel { draft, target, labels }, RowStats::from_kernel(found, None, needs))
    }

    /// Gradient by the drafter's logits, `[n, V]`; see [`reference::RowProbs::gradient`].
    fn into_gradient(self, coeffs: &GradCoeffs) -> Tensor {
        match self {
            Self::Kernel { mut draft, target, labels } => {
                let done = logits_grad(&mut draft, &target, &labels, &coeffs.to_tensor(&labels));
                assert!(done, "rows that a kernel measured have no gradient");
                draft
            }
            Self::Reference(measured) => measured.into_gradient(coeffs),
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// The reference on float64 rows agrees with the kernels on float32 rows.
    #[test]
    fn kernels_compute_what_the_reference_computes() {
        let values = |step: f64| {
            let angles = Tensor::arange(4 * 40, (Kind::Double, Device::Cpu)) * step;
            angles.sin().view([4, 40]) * 5.0
        };
        let (draft, target) = (values(0.37), values(1.3));
        let labels = Tensor::from_slice(&[3_i64, 0, 39, 7]);
        // The last row has the target's argmax.
        let preferred = target.get(3).argmax(-1, false).int64_value(&[]);
        let _ = draft.get(3).get(preferred).fill_(100.0);
        let needs = RequiredStats {
            soft: true,
            overlap: true,
            agreement: true,
            correct: true,
            block_verification: false,
        };
        let measured = [Kind::Float, Kind::Double].map(|kind| {
            let target = TargetRows::Logits(target.to_kind(kind).copy());
            let (rows, found) = MeasuredRows::measure(draft.to_kind(kind).copy(), target, &labels, needs);
            let factor = || Some(Tensor::from_slice(&[0.5f32, 1.0, 0.25, 2.0]).view([4, 1]).to_kind(kind));
            let slopes = rows.into_gradient(&GradCoeffs { label: factor(), soft: factor(), l1: factor() });
            let (soft, kl) = found.soft.unwrap();
            [found.ce, found.l1, found.overlap.unwrap(), soft, kl, found.agreement.unwrap(), slopes]
        });
        let [singles, doubles] = &measured;
        for (single, double) in singles.iter().zip(doubles) {
            let error = (single.to_kind(Kind::Double) - double).abs().max().double_value(&[]);
            assert!(error < 1e-4, "off by {error:e}");
        }
        let agreeing = singles[5].sum(Kind::Double).double_value(&[]);
        assert!(agreeing > 0.0 && agreeing < 4.0, "{agreeing} of 4 rows agree");
    }
}
