//! Losses of rows and their gradients, computed with libtorch's operators.

use tch::{Kind, Tensor};

use super::terms::{GradCoeffs, RequiredStats, RowStats};

/// Probabilities of measured rows, `[n, V]` each, for [`RowProbs::gradient`].
pub(super) struct RowProbs {
    draft: Tensor,
    target: Tensor,
    /// p^d − p^t.
    difference: Tensor,
    labels: Tensor, // [n, 1]
}

/// Turns float32 logits of drafter and target, `[n, V]` each, into probabilities in place. Compares the two
/// distributions with each other and with `labels [n, 1]`.
pub(super) fn measure(
    mut draft: Tensor,
    mut target: Tensor,
    labels: Tensor,
    needs: RequiredStats,
) -> (RowProbs, RowStats) {
    subtract_row_max(&mut draft);
    subtract_row_max(&mut target);
    let label = draft.gather(1, &labels, false);
    let logits = needs.soft.then(|| (draft.copy(), target.copy()));
    let (draft_log, target_log) = (softmax_in_place(&mut draft), softmax_in_place(&mut target));
    let soft = logits.map(|(draft_logits, target_logits)| {
        let soft_ce = &draft_log - row_sum(&(&target * draft_logits));
        let entropy = &target_log - row_sum(&(&target * target_logits));
        let kl = &soft_ce - entropy;
        (soft_ce, kl)
    });
    let difference = &draft - &target;
    let stats = RowStats {
        ce: draft_log - label,
        l1: row_sum(&difference.abs()),
        soft,
        agreement: None,
        correct: None,
        block_verification: None,
        overlap: needs.overlap.then(|| row_sum(&draft.minimum(&target))),
    };
    (RowProbs { draft, target, difference, labels }, stats)
}

impl RowProbs {
    /// Gradient by the drafter's logits, `[n, V]`, where s is the sign of p^d − p^t:
    /// `label·(p^d − onehot) + soft·(p^d − p^t) + l1·p^d ⊙ (s − Σ p^d s)`.
    pub(super) fn into_gradient(self, coeffs: &GradCoeffs) -> Tensor {
        let Self { draft, mut target, mut difference, labels } = self;
        let mut factor = labels.zeros_like().to_kind(Kind::Float); // of p^d, constant along a row
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

/// Softmax in place of `x [n, V]` with row maximum 0. Returns log Σ e^x.
fn softmax_in_place(x: &mut Tensor) -> Tensor {
    let _ = x.exp_();
    let sum = row_sum(x);
    let _ = x.g_mul_(&sum.reciprocal());
    sum.log()
}

/// Subtracts each row's maximum.
fn subtract_row_max(x: &mut Tensor) {
    let _ = x.g_sub_(&x.amax(-1, true));
}

fn row_sum(x: &Tensor) -> Tensor {
    x.sum_dim_intlist(-1, true, Kind::Float)
}
