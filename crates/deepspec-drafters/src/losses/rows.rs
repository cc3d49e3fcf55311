//! Some rows of logits: how far the drafter is from label and target, and the gradient by the drafter's logits.

use deepspec_native::{RowsMeasured, TargetLogits, measure_rows, slope_rows};
use tch::{Kind, Tensor};

use super::terms::{GradCoeffs, Needs, RowDistances};

/// Logits of some rows before they are measured, float32.
pub(super) struct RowLogits<'a> {
    /// Of the drafter, `[n, V]`.
    pub draft: Tensor,
    /// What they are still without, of each source; only with `source_of_row`.
    pub draft_bias: Option<&'a Tensor>,
    /// Of the target, `[n, V]`, or of each source.
    pub target: Tensor,
    /// Each row's source, `[n]`, where rows share what belongs to it.
    pub source_of_row: Option<Tensor>,
}

impl RowLogits<'_> {
    /// Those of drafter and target, `[n, V]` each.
    fn apart(self) -> (Tensor, Tensor) {
        let Self { mut draft, draft_bias, target, source_of_row } = self;
        let Some(source_of_row) = source_of_row else { return (draft, target) };
        if let Some(bias) = draft_bias {
            draft += bias.index_select(0, &source_of_row);
        }
        (draft, target.index_select(0, &source_of_row))
    }
}

/// p^d and p^t of some rows, `[n, V]` float32.
pub(super) struct Rows {
    draft: Tensor,
    target: Tensor,
    /// p^d − p^t, where libtorch's operators are taken.
    difference: Option<Tensor>,
    labels: Tensor, // [n, 1]
}

/// e^x / Σ e^x in place of `x [n, V]`, and log Σ e^x, once x has lost its largest value.
fn normalise(x: &mut Tensor) -> Tensor {
    let _ = x.exp_();
    let sum = row_sum(x);
    let _ = x.g_mul_(&sum.reciprocal());
    sum.log()
}

/// Takes each row's largest value off.
fn shift(x: &mut Tensor) {
    let _ = x.g_sub_(&x.amax(-1, true));
}

fn row_sum(x: &Tensor) -> Tensor {
    x.sum_dim_intlist(-1, true, Kind::Float)
}

impl Rows {
    /// Turns logits into probabilities and measures them; `labels [n]`. The drafter's logits are used up, and the target's where each row has its own.
    pub fn measure(mut logits: RowLogits, labels: &Tensor, needs: Needs) -> (Self, RowDistances) {
        assert!(
            logits.draft_bias.is_none() || logits.source_of_row.is_some(),
            "a bias by source wants sources"
        );
        let labels = labels.unsqueeze(1);
        let mut agreement = None;
        if needs.agreement {
            let (draft, target) = logits.apart();
            let same = draft.argmax(-1, true).eq_tensor(&target.argmax(-1, true));
            agreement = Some(same.to_kind(Kind::Float));
            logits = RowLogits { draft, draft_bias: None, target, source_of_row: None };
        }
        let RowLogits { draft, draft_bias, target, source_of_row } = &mut logits;
        let target = match source_of_row {
            Some(source_of_row) => {
                TargetLogits::BySource { rows: target, source_of_row, draft_bias: *draft_bias }
            }
            None => TargetLogits::Own(target),
        };
        if let Some(RowsMeasured { ce, l1, overlap, soft, target }) =
            measure_rows(draft, target, &labels, needs.soft)
        {
            let distances = RowDistances { ce, l1, soft, agreement, overlap: Some(overlap) };
            return (Self { draft: logits.draft, target, difference: None, labels }, distances);
        }
        let (mut draft, mut target) = logits.apart();
        shift(&mut draft);
        shift(&mut target);
        let label = draft.gather(1, &labels, false);
        let (draft_logits, target_logits) =
            (needs.soft.then(|| draft.copy()), needs.soft.then(|| target.copy()));
        let (draft_log, target_log) = (normalise(&mut draft), normalise(&mut target));
        let soft = draft_logits.zip(target_logits).map(|(draft_logits, target_logits)| {
            let soft_ce = &draft_log - row_sum(&(&target * draft_logits));
            let entropy = &target_log - row_sum(&(&target * target_logits));
            let kl = &soft_ce - entropy;
            (soft_ce, kl)
        });
        let difference = &draft - &target;
        let distances = RowDistances {
            ce: draft_log - label,
            l1: row_sum(&difference.abs()),
            soft,
            agreement,
            overlap: needs.overlap.then(|| row_sum(&draft.minimum(&target))),
        };
        (Self { draft, target, difference: Some(difference), labels }, distances)
    }

    /// Gradient by the drafter's logits, `[n, V]`: with sign s of p^d − p^t,
    /// `label·(p^d − onehot) + soft·(p^d − p^t) + l1·p^d ⊙ (s − Σ p^d s)`.
    pub fn gradient(self, coeffs: &GradCoeffs) -> Tensor {
        let Self { mut draft, mut target, difference, labels } = self;
        let none = labels.zeros_like().to_kind(Kind::Float);
        let Some(mut difference) = difference else {
            let factors = [&coeffs.label, &coeffs.soft, &coeffs.l1].map(|of| of.as_ref().unwrap_or(&none));
            let done = slope_rows(&mut draft, &target, &labels, &Tensor::cat(&factors, 1));
            assert!(done, "rows that were measured have no gradient");
            return draft;
        };
        let mut factor = none; // of p^d, constant along a row
        for coefficient in [&coeffs.label, &coeffs.soft].into_iter().flatten() {
            factor += coefficient;
        }
        let mut gradient = match &coeffs.l1 {
            Some(l1) => {
                let _ = difference.sign_();
                factor -= l1 * row_sum(&(&draft * &difference));
                let _ = difference.g_mul_(l1).g_add_(&factor);
                difference.g_mul_(&draft)
            }
            None => draft * factor,
        };
        if let Some(soft) = &coeffs.soft {
            let _ = gradient.g_sub_(&target.g_mul_(soft));
        }
        if let Some(label) = &coeffs.label {
            let _ = gradient.scatter_add_(1, &labels, &label.neg());
        }
        gradient
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// What the kernels refuse is measured by libtorch's operators, and rows of one source are those of copies there, too.
    #[test]
    fn rows_that_share_a_source_are_measured_as_copies_are() {
        let values = |rows: i64, step: f64, kind: Kind| {
            let angles = Tensor::arange(rows * 40, (Kind::Double, Device::Cpu)) * step;
            (angles.sin().view([rows, 40]) * 5.0).to_kind(kind)
        };
        let source_of_row = Tensor::from_slice(&[0_i64, 2, 2, 0]);
        let labels = Tensor::from_slice(&[3_i64, 0, 39, 7]);
        for kind in [Kind::Float, Kind::Double] {
            let (draft, target, bias) = (values(4, 0.37, kind), values(3, 1.3, kind), values(3, 0.7, kind));
            // The last row agrees with its target.
            let preferred = target.get(0).argmax(-1, false).int64_value(&[]);
            let _ = draft.get(3).get(preferred).fill_(100.0);
            for (agreement, bias) in [(true, Some(&bias)), (false, Some(&bias)), (false, None)] {
                let needs = Needs { soft: true, overlap: true, agreement };
                let shared = RowLogits {
                    draft: draft.copy(),
                    draft_bias: bias,
                    target: target.copy(),
                    source_of_row: Some(source_of_row.copy()),
                };
                let mut whole = draft.copy();
                if let Some(bias) = bias {
                    whole += bias.index_select(0, &source_of_row);
                }
                let target = target.index_select(0, &source_of_row);
                let copies = RowLogits { draft: whole, draft_bias: None, target, source_of_row: None };
                let measured = [shared, copies].map(|logits| Rows::measure(logits, &labels, needs));
                let [(shared_rows, shared), (rows_of_copies, copies)] = measured;
                assert!(shared.ce.equal(&copies.ce) && shared.l1.equal(&copies.l1), "{kind:?}");
                assert!(shared.overlap.unwrap().equal(&copies.overlap.unwrap()), "{kind:?}");
                assert_eq!(shared.agreement.is_some(), agreement);
                if let (Some(shared), Some(copies)) = (shared.agreement, copies.agreement) {
                    assert!(shared.equal(&copies), "{kind:?}");
                    let agreeing = shared.sum(Kind::Double).double_value(&[]);
                    assert!(agreeing > 0.0 && agreeing < 4.0, "{agreeing} of 4 rows agree");
                }
                let factor =
                    || Some(Tensor::from_slice(&[0.5f32, 1.0, 0.25, 2.0]).view([4, 1]).to_kind(kind));
                let coeffs = || GradCoeffs { label: factor(), soft: factor(), l1: factor() };
                let [shared_slopes, of_copies] =
                    [shared_rows, rows_of_copies].map(|rows| rows.gradient(&coeffs()));
                assert!(shared_slopes.equal(&of_copies), "{kind:?}");
                let [(soft, kl), (of_copies, and_kl)] = [shared.soft, copies.soft].map(Option::unwrap);
                assert!(soft.equal(&of_copies) && kl.equal(&and_kl), "{kind:?}");
            }
        }
    }
}
