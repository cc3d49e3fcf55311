//! Losses of rows of logits on the CPU, mostly in place.

use std::ffi::c_void;
use std::ptr;

use tch::{Device, Tensor};

use super::rows::owned;

unsafe extern "C" {
    fn ds_measure_rows(
        draft: *const c_void,
        draft_bias: *const c_void,
        target: *const c_void,
        source_of_row: *const c_void,
        probabilities: *const c_void,
        labels: *const c_void,
        soft: bool,
    ) -> *mut c_void;
    fn ds_sum_rows(rows: *const c_void, source_of_row: *const c_void, sums: *const c_void) -> bool;
    fn ds_slope_rows(
        draft: *const c_void,
        target: *const c_void,
        labels: *const c_void,
        factors: *const c_void,
    ) -> bool;
}

/// Logits of a target for n rows of a drafter.
pub enum TargetLogits<'a> {
    /// Of each row, `[n, V]`, which are used up.
    Own(&'a mut Tensor),
    /// Of S sources, which rows share; they have no memory in common with the drafter's.
    BySource {
        /// `[S, V]`.
        rows: &'a Tensor,
        /// Each row's source, `[n]` int64.
        source_of_row: &'a Tensor,
        /// What the drafter's logits are still without, of each source, `[S, V]`.
        draft_bias: Option<&'a Tensor>,
    },
}

/// How far n rows of logits of a drafter are from their labels x* and from a target's; p^d and p^t are the probabilities. Distances are `[n, 1]` each.
pub struct RowsMeasured {
    /// −log p^d(x*).
    pub ce: Tensor,
    /// ‖p^d − p^t‖₁.
    pub l1: Tensor,
    /// Σ min(p^d, p^t).
    pub overlap: Tensor,
    /// −Σ p^t log p^d and Σ p^t log(p^t/p^d), where they were asked for.
    pub soft: Option<(Tensor, Tensor)>,
    /// p^t, `[n, V]`: in place of the logits where each row has its own.
    pub target: Tensor,
}

/// Measures rows of logits `draft [n, V]` with `labels [n]`, and turns them into probabilities, as it does the target's where each row has its own.
///
/// None, and nothing done, where libtorch's own operators are to be taken: on other devices, of other kinds or layouts, where a label is no token or
/// a source none of the target's, and where gradients are asked for.
pub fn measure_rows(
    draft: &mut Tensor,
    target: TargetLogits,
    labels: &Tensor,
    soft: bool,
) -> Option<RowsMeasured> {
    if draft.device() != Device::Cpu {
        return None;
    }
    let null = ptr::null::<c_void>();
    let (rows, source_of_row, draft_bias, probabilities) = match target {
        TargetLogits::Own(rows) => (rows.as_ptr().cast(), null, null, rows.shallow_clone()),
        TargetLogits::BySource { rows, source_of_row, draft_bias } => {
            let bias = draft_bias.map_or(null, |bias| bias.as_ptr().cast());
            (rows.as_ptr().cast(), source_of_row.as_ptr().cast(), bias, draft.empty_like())
        }
    };
    // SAFETY: the shim writes to the drafter's rows and the probabilities only and reads the others, of which two may be null, during the call; it catches
    // every C++ exception, and returns null or a tensor of its own.
    let found = unsafe {
        let (draft, labels) = (draft.as_ptr().cast(), labels.as_ptr().cast());
        owned(ds_measure_rows(
            draft,
            draft_bias,
            rows,
            source_of_row,
            probabilities.as_ptr().cast(),
            labels,
            soft,
        ))?
    };
    let column = |column: i64| found.narrow(1, column, 1);
    Some(RowsMeasured {
        ce: column(0),
        l1: column(1),
        overlap: column(2),
        soft: soft.then(|| (column(3), column(4))),
        target: probabilities,
    })
}

/// In place of `sums [S, V]`, the sums of those of `rows [n, V]` that have the same source, `source_of_row [n]` int64. Both share no memory.
pub fn sum_rows(rows: &Tensor, source_of_row: &Tensor, sums: &mut Tensor) {
    // SAFETY: the shim writes to the last tensor only, which is the caller's alone, and reads the others, during the call, and catches every C++ exception.
    let done =
        unsafe { ds_sum_rows(rows.as_ptr().cast(), source_of_row.as_ptr().cast(), sums.as_ptr().cast()) };
    if !done {
        let _ = sums.zero_().index_add_(0, source_of_row, rows);
    }
}

/// Turns the probabilities `draft [n, V]` of [`measure_rows`] into gradients by the logits: `factors [n, 3]` of p^d − onehot(x*), of p^d − p^t, and of
/// ∂‖p^d − p^t‖₁. Says whether it did, which it does wherever [`measure_rows`] does.
pub fn slope_rows(draft: &mut Tensor, target: &Tensor, labels: &Tensor, factors: &Tensor) -> bool {
    // SAFETY: the shim writes to the first tensor only and reads the others, during the call, and catches every C++ exception.
    unsafe {
        let (draft, target) = (draft.as_ptr().cast(), target.as_ptr().cast());
        ds_slope_rows(draft, target, labels.as_ptr().cast(), factors.as_ptr().cast())
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn values(rows: i64, vocab: i64, step: f64) -> Tensor {
        (Tensor::arange(rows * vocab, (Kind::Double, Device::Cpu)) * step).sin().view([rows, vocab]) * 6.0
    }

    fn assert_near(found: &Tensor, exact: &Tensor, what: &str) {
        let off = (found.to_kind(Kind::Double) - exact).abs().max().double_value(&[]);
        let most = exact.abs().max().double_value(&[]);
        assert!(off <= 2e-6 * most.max(1e-3), "{what}: off by {off} of {most}");
    }

    /// With a target that each row has its own of, which is used up.
    fn measure(draft: &mut Tensor, target: &Tensor, labels: &Tensor, soft: bool) -> Option<RowsMeasured> {
        measure_rows(draft, TargetLogits::Own(&mut target.shallow_clone()), labels, soft)
    }

    /// Against formulas in float64, and autograd's gradients of them.
    #[test]
    fn distances_and_gradients_are_those_of_the_formulas() {
        // Fewer tokens than lanes, a rest behind them, more than one span of sums; more rows than a thread's worth.
        for (rows, vocab) in [(3, 5), (9, 1500), (70, 1024)] {
            let (draft, target) =
                (values(rows, vocab, 0.37).set_requires_grad(true), values(rows, vocab, 1.3));
            let labels = Tensor::arange(rows, (Kind::Int64, Device::Cpu)).unsqueeze(1).remainder(vocab);
            let factors = values(rows, 3, 0.9).abs();
            let (log_p, log_t) = (draft.log_softmax(-1, Kind::Double), target.log_softmax(-1, Kind::Double));
            let (p, t) = (log_p.exp(), log_t.exp());
            let sum = |x: &Tensor| x.sum_dim_intlist(-1, true, Kind::Double);
            let (ce, l1) = (-log_p.gather(1, &labels, false), sum(&(&p - &t).abs()));
            let (soft, divergence) = (-sum(&(&t * &log_p)), sum(&(&t * (&log_t - &log_p))));
            let of = |column: i64| factors.narrow(1, column, 1);
            (&ce * of(0) + &soft * of(1) + &l1 * of(2)).sum(Kind::Double).backward();

            let single = |x: &Tensor| x.detach().to_kind(Kind::Float);
            let (mut ours, theirs) = (single(&draft), single(&target));
            let measured = measure(&mut ours, &theirs, &labels, true).unwrap();
            assert_near(&measured.ce, &ce, "cross entropy");
            assert_near(&measured.l1, &l1, "L1");
            assert_near(&measured.overlap, &sum(&p.minimum(&t)), "overlap");
            let (soft_found, divergence_found) = measured.soft.unwrap();
            assert_near(&soft_found, &soft, "soft cross entropy");
            assert_near(&divergence_found, &divergence, "divergence");
            assert_near(&ours, &p, "p^d");
            assert_near(&theirs, &t, "p^t");
            assert!(slope_rows(&mut ours, &theirs, &labels, &single(&factors)));
            assert_near(&ours, &draft.grad(), "gradient");
        }
    }

    /// A run that is lost must not look like one that learned everything.
    #[test]
    fn what_is_no_number_stays_none() {
        let labels = Tensor::from_slice(&[3_i64, 0]);
        for broken in [f64::NAN, f64::INFINITY] {
            for in_target in [false, true] {
                let (mut draft, target) =
                    (values(2, 40, 0.37).to_kind(Kind::Float), values(2, 40, 1.3).to_kind(Kind::Float));
                let _ =
                    if in_target { &target } else { &draft }.narrow(0, 1, 1).narrow(1, 5, 1).fill_(broken);
                let found = measure(&mut draft, &target, &labels, true).unwrap();
                let (soft_ce, kl) = found.soft.unwrap();
                let lost = |distance: &Tensor| [0, 1].map(|row| distance.double_value(&[row, 0]).is_nan());
                for distance in [&found.l1, &found.overlap, &soft_ce, &kl] {
                    assert_eq!(lost(distance), [false, true], "{broken}, {in_target}");
                }
                assert_eq!(lost(&found.ce), [false, !in_target]);
                // A target without weight spoils no gradient.
                let label_only = Tensor::from_slice(&[1f32, 0.0, 0.0, 1.0, 0.0, 0.0]).view([2, 3]);
                assert!(slope_rows(&mut draft, &target, &labels, &label_only));
                let spoilt = [0, 1].map(|row| draft.get(row).isnan().any().int64_value(&[]) != 0);
                assert_eq!(spoilt, [false, !in_target]);
            }
        }
    }

    #[test]
    fn what_they_are_not_made_for_is_left_as_it_is() {
        let logits = values(2, 8, 0.37).to_kind(Kind::Float);
        let refused = |draft: &Tensor, labels: [i64; 2]| {
            let (mut draft, target) = (draft.copy(), logits.copy());
            let measured = measure(&mut draft, &target, &Tensor::from_slice(&labels), false);
            measured.is_none() && target.equal(&logits)
        };
        assert!(!refused(&logits, [0, 7]));
        assert!(refused(&logits, [0, 8]) && refused(&logits, [-1, 0]), "labels that are no token");
        assert!(refused(&logits.to_kind(Kind::BFloat16), [0, 7]));
        assert!(refused(&logits.narrow(0, 0, 1), [0, 7]));
        let (mut learned, labels) = (logits.copy().set_requires_grad(true), Tensor::from_slice(&[0_i64, 7]));
        assert!(measure(&mut learned, &logits.copy(), &labels, false).is_none());
        let by_source = |of: [i64; 2], added: &Tensor| {
            let (of, mut draft) = (Tensor::from_slice(&of), logits.copy());
            let target =
                TargetLogits::BySource { rows: &logits, source_of_row: &of, draft_bias: Some(added) };
            let refused = measure_rows(&mut draft, target, &labels, false).is_none();
            assert!(!refused || draft.equal(&logits), "refused, but changed");
            refused
        };
        assert!(!by_source([1, 1], &logits));
        assert!(by_source([0, 2], &logits) && by_source([-1, 0], &logits), "sources that are none");
        assert!(by_source([1, 1], &logits.narrow(1, 0, 7)) && by_source([1, 1], &logits.narrow(0, 0, 1)));
    }

    /// Bit for bit what is found where each row has a copy of its own.
    #[test]
    fn rows_of_one_source_are_those_of_copies() {
        for vocab in [5, 1500] {
            let (draft, target) =
                (values(6, vocab, 0.37).to_kind(Kind::Float), values(3, vocab, 1.3).to_kind(Kind::Float));
            let added = values(3, vocab, 0.7).to_kind(Kind::Float);
            let labels = Tensor::from_slice(&[3_i64, 0, 1, 4, 2, 2]);
            let of = Tensor::from_slice(&[0_i64, 2, 2, 0, 2, 0]);
            for added in [None, Some(&added)] {
                let (mut ours, mut copies) = (draft.copy(), draft.copy());
                if let Some(added) = added {
                    copies += added.index_select(0, &of);
                }
                let by_source =
                    TargetLogits::BySource { rows: &target, source_of_row: &of, draft_bias: added };
                let shared = measure_rows(&mut ours, by_source, &labels, true).unwrap();
                let apart = measure(&mut copies, &target.index_select(0, &of), &labels, true).unwrap();
                assert!(ours.equal(&copies) && shared.target.equal(&apart.target));
                assert!(shared.ce.equal(&apart.ce) && shared.l1.equal(&apart.l1));
                assert!(shared.overlap.equal(&apart.overlap));
                let ((soft, divergence), (of_copies, and_divergence)) =
                    (shared.soft.unwrap(), apart.soft.unwrap());
                assert!(soft.equal(&of_copies) && divergence.equal(&and_divergence));
            }
            assert!(
                target.equal(&values(3, vocab, 1.3).to_kind(Kind::Float)),
                "what is shared is left as it is"
            );
            // A source without rows has the sum 0, whatever lay there.
            let mut sums = target.copy();
            sum_rows(&draft, &of, &mut sums);
            assert!(sums.equal(&target.zeros_like().index_add(0, &of, &draft)));
        }
    }
}
