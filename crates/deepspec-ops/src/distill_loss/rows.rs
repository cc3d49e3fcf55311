//! Some rows of logits: how far the drafter is from label and target, and the gradient by the drafter's logits.

use tch::{Kind, Tensor};

use super::terms::{GradCoeffs, Needs, RowStats};
use crate::ffi::{RowsMeasured, TargetProbs, measure_rows, slope_rows, softmax_targets};

/// What the target has for some rows of the drafter.
pub(super) enum Target {
    /// Logits of each row, `[n, V]` float32.
    Logits(Tensor),
    /// Probabilities, which rows may share.
    Weighed(TargetProbs),
}

/// p^d of some rows, `[n, V]` float32, and what their gradient needs beside them.
pub(super) struct Rows {
    draft: Tensor,
    against: Against,
    labels: Tensor, // [n, 1]
}

enum Against {
    Weighed(TargetProbs),
    /// p^t and p^d − p^t, `[n, V]`, where libtorch's operators are taken.
    Separate {
        target: Tensor,
        difference: Tensor,
    },
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
    /// Turns logits of the drafter, `[n, V]` float32, into probabilities and measures them; `labels [n]`. Logits are used up.
    pub fn measure(mut draft: Tensor, target: Target, labels: &Tensor, needs: Needs) -> (Self, RowStats) {
        let labels = labels.unsqueeze(1);
        let mut target = match target {
            Target::Weighed(target) => {
                assert!(!needs.agreement, "which token a weighed target prefers is not known any more");
                return Self::measure_weighed(draft, target, labels, needs);
            }
            Target::Logits(target) => target,
        };
        let agreement = needs.agreement.then(|| {
            let same = draft.argmax(-1, true).eq_tensor(&target.argmax(-1, true));
            same.to_kind(Kind::Float)
        });
        if let Some(entropies) = softmax_targets(&mut target, needs.soft) {
            let target = TargetProbs { probabilities: target, entropies, source_of_row: None };
            let (rows, distances) = Self::measure_weighed(draft, target, labels, needs);
            return (rows, RowStats { agreement, ..distances });
        }
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
        let distances = RowStats {
            ce: draft_log - label,
            l1: row_sum(&difference.abs()),
            soft,
            agreement,
            overlap: needs.overlap.then(|| row_sum(&draft.minimum(&target))),
        };
        (Self { draft, against: Against::Separate { target, difference }, labels }, distances)
    }

    fn measure_weighed(
        mut draft: Tensor,
        target: TargetProbs,
        labels: Tensor,
        needs: Needs,
    ) -> (Self, RowStats) {
        let measured = measure_rows(&mut draft, &target, &labels, needs.soft);
        let Some(RowsMeasured { ce, l1, overlap, soft }) = measured else {
            panic!("no memory for rows {:?}, or they do not fit {target:?}", draft.size());
        };
        let distances = RowStats { ce, l1, soft, agreement: None, overlap: Some(overlap) };
        (Self { draft, against: Against::Weighed(target), labels }, distances)
    }

    /// Gradient by the drafter's logits, `[n, V]`: with sign s of p^d − p^t,
    /// `label·(p^d − onehot) + soft·(p^d − p^t) + l1·p^d ⊙ (s − Σ p^d s)`.
    pub fn gradient(self, coeffs: &GradCoeffs) -> Tensor {
        let Self { mut draft, against, labels } = self;
        let none = labels.zeros_like().to_kind(Kind::Float);
        let (mut target, mut difference) = match against {
            Against::Separate { target, difference } => (target, difference),
            Against::Weighed(target) => {
                let done = slope_rows(&mut draft, &target, &labels, &coeffs.factors(&labels));
                assert!(done, "rows that were measured have no gradient");
                return draft;
            }
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

    /// What the kernels refuse is measured by libtorch's operators, and finds what they find of float32.
    #[test]
    fn rows_of_other_kinds_are_measured_as_those_of_float32_are() {
        let values = |step: f64| {
            let angles = Tensor::arange(4 * 40, (Kind::Double, Device::Cpu)) * step;
            angles.sin().view([4, 40]) * 5.0
        };
        let (draft, target) = (values(0.37), values(1.3));
        let labels = Tensor::from_slice(&[3_i64, 0, 39, 7]);
        // The last row agrees with its target.
        let preferred = target.get(3).argmax(-1, false).int64_value(&[]);
        let _ = draft.get(3).get(preferred).fill_(100.0);
        let needs = Needs { soft: true, overlap: true, agreement: true };
        let measured = [Kind::Float, Kind::Double].map(|kind| {
            let target = Target::Logits(target.to_kind(kind).copy());
            let (rows, found) = Rows::measure(draft.to_kind(kind).copy(), target, &labels, needs);
            let factor = || Some(Tensor::from_slice(&[0.5f32, 1.0, 0.25, 2.0]).view([4, 1]).to_kind(kind));
            let slopes = rows.gradient(&GradCoeffs { label: factor(), soft: factor(), l1: factor() });
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
