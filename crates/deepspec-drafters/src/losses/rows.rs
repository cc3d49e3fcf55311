//! Some rows of logits: how far the drafter is from label and target, and the gradient by the drafter's logits.

use deepspec_native::{normalise_rows, row_differences, tilt_rows};
use tch::{Kind, Tensor};

use super::terms::{GradCoeffs, Needs, RowDistances};

/// p^d and p^t of some rows, `[n, V]` float32.
pub(super) struct Rows {
    draft: Tensor,
    target: Tensor,
    /// Σ p^d·s with the sign s of p^d − p^t, `[n, 1]`.
    signed: Tensor,
    labels: Tensor, // [n, 1]
}

/// e^x / Σ e^x in place of `x [n, V]`; the largest value m of each row, and log Σ e^(x − m), `[n, 1]` both.
fn normalise(x: &mut Tensor) -> (Tensor, Tensor) {
    if let Some(found) = normalise_rows(x) {
        return (found.narrow(1, 0, 1), found.narrow(1, 1, 1));
    }
    let most = x.amax(-1, true);
    let _ = x.g_sub_(&most).exp_();
    let sum = row_sum(x);
    let _ = x.g_mul_(&sum.reciprocal());
    (most, sum.log())
}

/// ‖p − q‖₁ and Σ p·sign(p − q) of each row, `[n, 1]` both.
fn differences(p: &Tensor, q: &Tensor) -> (Tensor, Tensor) {
    if let Some(found) = row_differences(p, q) {
        return (found.narrow(1, 0, 1), found.narrow(1, 1, 1));
    }
    let mut difference = p - q;
    let l1 = row_sum(&difference.abs());
    let _ = difference.sign_().g_mul_(p);
    (l1, row_sum(&difference))
}

/// p·(rise·sign(p − q) + factor) in place of p; `rise [n, 1]`, `factor [n, 1]`.
fn tilt(p: &mut Tensor, q: &Tensor, rise: &Tensor, factor: &Tensor) {
    if !tilt_rows(p, q, rise, factor) {
        let mut sign = &*p - q;
        let _ = sign.sign_().g_mul_(rise).g_add_(factor);
        let _ = p.g_mul_(&sign);
    }
}

fn row_sum(x: &Tensor) -> Tensor {
    x.sum_dim_intlist(-1, true, Kind::Float)
}

impl Rows {
    /// Turns logits, which are used up, into probabilities and measures them; `labels [n]`.
    pub fn measure(
        mut draft: Tensor,
        mut target: Tensor,
        labels: &Tensor,
        needs: Needs,
    ) -> (Self, RowDistances) {
        let labels = labels.unsqueeze(1);
        let agreement = needs
            .agreement
            .then(|| draft.argmax(-1, true).eq_tensor(&target.argmax(-1, true)).to_kind(Kind::Float));
        let label = draft.gather(1, &labels, false);
        let logits = needs.soft.then(|| (draft.copy(), target.copy()));
        let (draft_most, draft_log) = normalise(&mut draft);
        let (target_most, target_log) = normalise(&mut target);
        let soft = logits.map(|(mut draft_logits, mut target_logits)| {
            let soft_ce = &draft_log - row_sum(&draft_logits.g_sub_(&draft_most).g_mul_(&target));
            let entropy = target_log - row_sum(&target_logits.g_sub_(&target_most).g_mul_(&target));
            let kl = &soft_ce - entropy;
            (soft_ce, kl)
        });
        let (l1, signed) = differences(&draft, &target);
        let distances = RowDistances {
            ce: draft_log - (label - draft_most),
            l1,
            soft,
            agreement,
            overlap: needs.overlap.then(|| row_sum(&draft.minimum(&target))),
        };
        (Self { draft, target, signed, labels }, distances)
    }

    /// Gradient by the drafter's logits, `[n, V]`: with sign s of p^d − p^t,
    /// `label·(p^d − onehot) + soft·(p^d − p^t) + l1·p^d ⊙ (s − Σ p^d s)`.
    pub fn gradient(self, coeffs: &GradCoeffs) -> Tensor {
        let Self { mut draft, mut target, signed, labels } = self;
        let mut factor = labels.zeros_like().to_kind(Kind::Float); // of p^d, constant along a row
        for coefficient in [&coeffs.label, &coeffs.soft].into_iter().flatten() {
            factor += coefficient;
        }
        match &coeffs.l1 {
            Some(l1) => {
                factor -= l1 * signed;
                tilt(&mut draft, &target, l1, &factor);
            }
            None => draft *= factor,
        }
        let mut gradient = draft;
        if let Some(soft) = &coeffs.soft {
            let _ = gradient.g_sub_(&target.g_mul_(soft));
        }
        if let Some(label) = &coeffs.label {
            let _ = gradient.scatter_add_(1, &labels, &label.neg());
        }
        gradient
    }
}
