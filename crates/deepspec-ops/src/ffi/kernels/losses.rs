//! Losses of rows of logits, in place: float32 on the CPU, and bfloat16 on a GPU.

use std::ffi::{c_char, c_void};
use std::ptr;

use tch::Tensor;

use super::super::args::{LogitRows, RowsMeasured, TargetProbs};
use super::super::c10d::check;
use super::super::owned;

unsafe extern "C" {
    fn ds_weigh_target(logits: *const c_void, entropy: bool) -> *mut c_void;
    fn ds_measure_rows(
        draft: *const c_void,
        target: *const c_void,
        entropies: *const c_void,
        source_of_row: *const c_void,
        labels: *const c_void,
        soft: bool,
    ) -> *mut c_void;
    fn ds_sum_rows(rows: *const c_void, source_of_row: *const c_void, sums: *const c_void) -> bool;
    fn ds_add_to_rows(rows: *const c_void, source_of_row: *const c_void, values: *const c_void) -> bool;
    fn ds_slope_rows(
        draft: *const c_void,
        target: *const c_void,
        source_of_row: *const c_void,
        labels: *const c_void,
        factors: *const c_void,
    ) -> bool;
    fn ds_measure_logits(
        base: *const c_void,
        bias: *const c_void,
        target: *const c_void,
        source_of_row: *const c_void,
        labels: *const c_void,
        cap: f64,
    ) -> *mut c_void;
    fn ds_slope_logits(
        base: *const c_void,
        bias: *const c_void,
        target: *const c_void,
        source_of_row: *const c_void,
        labels: *const c_void,
        cap: f64,
        found: *const c_void,
        factors: *const c_void,
    ) -> *mut c_char;
}

/// What [`LogitRows::measure`] found: a column for each of the distances, and what the gradients need.
pub struct LogitsMeasured {
    found: Tensor, // [n, 9] float32
}

impl LogitRows<'_> {
    /// Measures the rows, which stay as they are.
    ///
    /// None where there are no kernels for them: on the CPU, of other kinds, and where a GPU's driver or compiler is not found.
    pub fn measure(&self) -> Option<LogitsMeasured> {
        let Self { base, bias, target, source_of_row, labels, cap } = self;
        // SAFETY: the shim has a GPU read all of them, of which two may be null, behind what the thread's stream has to do, and libtorch gives their memory
        // to nobody else before. Labels and sources are the caller's own numbers of tokens and rows. It catches every C++ exception, and returns null or a
        // tensor of its own.
        let found = unsafe {
            owned(ds_measure_logits(
                base.as_ptr().cast(),
                pointer(*bias),
                target.as_ptr().cast(),
                pointer(*source_of_row),
                labels.as_ptr().cast(),
                cap.unwrap_or(0.0),
            ))
        };
        found.map(|found| LogitsMeasured { found })
    }

    /// Puts gradients in place of rows that were measured: by the bias where there is one, and by the base where there is none or a cap between both.
    /// `factors [n, 3]` are those of [`logits_grad`].
    ///
    /// # Panics
    /// If the rows are not those that were measured, or with the driver's words.
    pub fn backward(self, measured: &LogitsMeasured, factors: &Tensor) {
        let Self { base, bias, target, source_of_row, labels, cap } = self;
        // SAFETY: as above; the rows that are written are the caller's alone.
        let problem = unsafe {
            ds_slope_logits(
                base.as_ptr().cast(),
                pointer(bias),
                target.as_ptr().cast(),
                pointer(source_of_row),
                labels.as_ptr().cast(),
                cap.unwrap_or(0.0),
                measured.found.as_ptr().cast(),
                factors.as_ptr().cast(),
            )
        };
        if let Err(problem) = check(problem) {
            panic!("gradients of rows that were measured: {problem}");
        }
    }
}

impl LogitsMeasured {
    /// The distances; the soft ones always.
    pub fn distances(&self) -> RowsMeasured {
        let column = |column: i64| self.found.narrow(1, column, 1);
        RowsMeasured { ce: column(2), l1: column(3), overlap: column(4), soft: Some((column(5), column(6))) }
    }

    /// 1 where drafter and target prefer the same token, `[n, 1]`.
    pub fn agreement(&self) -> Tensor {
        self.found.narrow(1, 7, 1)
    }
}

fn pointer(tensor: Option<&Tensor>) -> *const c_void {
    tensor.map_or(ptr::null(), |tensor| tensor.as_ptr().cast())
}

/// Turns rows of a target's logits `[S, V]` into probabilities, in place. Gives their entropies, `[S]` float64, zeros unless asked for.
///
/// None, and nothing done, where libtorch's own operators are to be taken: on other devices, of other kinds or layouts, where gradients are asked for,
/// and where there is nothing.
pub fn softmax_targets(logits: &mut Tensor, entropies: bool) -> Option<Tensor> {
    // SAFETY: the shim writes to the rows, which are the caller's alone, during the call; it catches every C++ exception, and returns null or a tensor of
    // its own.
    unsafe { owned(ds_weigh_target(logits.as_ptr().cast(), entropies)) }
}

/// Measures rows of logits `draft [n, V]` beside `labels [n]` and a target, and turns them into probabilities. The tensors share no memory.
///
/// None, and nothing done, as for [`softmax_targets`], where a label is no token or a source none of the target's, and where sizes do not fit.
pub fn measure_rows(
    draft: &mut Tensor,
    target: &TargetProbs,
    labels: &Tensor,
    soft: bool,
) -> Option<RowsMeasured> {
    // SAFETY: the shim writes to the drafter's rows only and reads the others, of which one may be null, during the call; it catches every C++ exception,
    // and returns null or a tensor of its own.
    let found = unsafe {
        owned(ds_measure_rows(
            draft.as_ptr().cast(),
            target.probabilities.as_ptr().cast(),
            target.entropies.as_ptr().cast(),
            pointer(target.source_of_row.as_ref()),
            labels.as_ptr().cast(),
            soft,
        ))?
    };
    let column = |column: i64| found.narrow(1, column, 1);
    Some(RowsMeasured {
        ce: column(0),
        l1: column(1),
        overlap: column(2),
        soft: soft.then(|| (column(3), column(4))),
    })
}

/// In place of `sums [S, V]`, the sums of those of `rows [n, V]` that have the same source, `source_of_row [n]` int64. Both share no memory.
///
/// False, and nothing is done, as for [`softmax_targets`].
pub fn sum_rows(rows: &Tensor, source_of_row: &Tensor, sums: &mut Tensor) -> bool {
    // SAFETY: the shim writes to the last tensor only, which is the caller's alone, and reads the others, during the call, and catches every C++ exception.
    unsafe { ds_sum_rows(rows.as_ptr().cast(), source_of_row.as_ptr().cast(), sums.as_ptr().cast()) }
}

/// Adds to each of `rows [n, V]` the row of `values [S, V]` whose number `source_of_row [n]` int64 has for it. Both share no memory.
///
/// False, and nothing is done, as for [`softmax_targets`].
pub fn add_to_rows(rows: &mut Tensor, source_of_row: &Tensor, values: &Tensor) -> bool {
    // SAFETY: the shim writes to the first tensor only, which is the caller's alone, and reads the others, during the call, and catches every C++ exception.
    unsafe { ds_add_to_rows(rows.as_ptr().cast(), source_of_row.as_ptr().cast(), values.as_ptr().cast()) }
}

/// Turns the probabilities `draft [n, V]` of [`measure_rows`] into gradients by the logits: `factors [n, 3]` of p^d − onehot(x*), of p^d − p^t, and of
/// ∂‖p^d − p^t‖₁. Says whether it did, which it does wherever [`measure_rows`] does.
pub fn logits_grad(draft: &mut Tensor, target: &TargetProbs, labels: &Tensor, factors: &Tensor) -> bool {
    // SAFETY: the shim writes to the first tensor only and reads the others, of which one may be null, during the call, and catches every C++ exception.
    unsafe {
        ds_slope_rows(
            draft.as_ptr().cast(),
            target.probabilities.as_ptr().cast(),
            pointer(target.source_of_row.as_ref()),
            labels.as_ptr().cast(),
            factors.as_ptr().cast(),
        )
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

    /// The target's logits as `measure_rows` reads them, used up.
    fn weighed(mut logits: Tensor, source_of_row: Option<&Tensor>) -> TargetProbs {
        let entropies = softmax_targets(&mut logits, true).unwrap();
        TargetProbs {
            probabilities: logits,
            entropies,
            source_of_row: source_of_row.map(Tensor::shallow_clone),
        }
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
            let (mut ours, theirs) = (single(&draft), weighed(single(&target), None));
            let measured = measure_rows(&mut ours, &theirs, &labels, true).unwrap();
            assert_near(&measured.ce, &ce, "cross entropy");
            assert_near(&measured.l1, &l1, "L1");
            assert_near(&measured.overlap, &sum(&p.minimum(&t)), "overlap");
            let (soft_found, divergence_found) = measured.soft.unwrap();
            assert_near(&soft_found, &soft, "soft cross entropy");
            assert_near(&divergence_found, &divergence, "divergence");
            assert_near(&ours, &p, "p^d");
            assert_near(&theirs.probabilities, &t, "p^t");
            assert_near(&theirs.entropies, &-sum(&(&t * &log_t)).squeeze_dim(1), "entropy");
            assert!(logits_grad(&mut ours, &theirs, &labels, &single(&factors)));
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
                let target = weighed(target, None);
                let found = measure_rows(&mut draft, &target, &labels, true).unwrap();
                let (soft_ce, kl) = found.soft.unwrap();
                let lost = |distance: &Tensor| [0, 1].map(|row| distance.double_value(&[row, 0]).is_nan());
                for distance in [&found.l1, &found.overlap, &soft_ce, &kl] {
                    assert_eq!(lost(distance), [false, true], "{broken}, {in_target}");
                }
                assert_eq!(lost(&found.ce), [false, !in_target]);
                // A target without weight spoils no gradient.
                let label_only = Tensor::from_slice(&[1f32, 0.0, 0.0, 1.0, 0.0, 0.0]).view([2, 3]);
                assert!(logits_grad(&mut draft, &target, &labels, &label_only));
                let spoilt = [0, 1].map(|row| draft.get(row).isnan().any().int64_value(&[]) != 0);
                assert_eq!(spoilt, [false, !in_target]);
            }
        }
    }

    #[test]
    fn what_they_are_not_made_for_is_left_as_it_is() {
        let logits = values(2, 8, 0.37).to_kind(Kind::Float);
        let refused = |draft: &Tensor, of: Option<[i64; 2]>, labels: [i64; 2]| {
            let of = of.map(|of| Tensor::from_slice(&of));
            let (mut ours, target) = (draft.copy(), weighed(logits.copy(), of.as_ref()));
            let labels = Tensor::from_slice(&labels);
            let refused = measure_rows(&mut ours, &target, &labels, false).is_none();
            assert!(!refused || ours.equal(draft), "refused, but changed");
            refused
        };
        assert!(!refused(&logits, None, [0, 7]));
        assert!(
            refused(&logits, None, [0, 8]) && refused(&logits, None, [-1, 0]),
            "labels that are no token"
        );
        assert!(refused(&logits.to_kind(Kind::BFloat16), None, [0, 7]));
        assert!(refused(&logits.narrow(0, 0, 1), None, [0, 7]));
        assert!(refused(&logits.narrow(1, 0, 7), None, [0, 6]));
        assert!(!refused(&logits, Some([1, 1]), [0, 7]));
        for of in [[0, 2], [-1, 0]] {
            assert!(refused(&logits, Some(of), [0, 7]), "sources that are none");
        }
        let (mut learned, labels) = (logits.copy().set_requires_grad(true), Tensor::from_slice(&[0_i64, 7]));
        assert!(measure_rows(&mut learned, &weighed(logits.copy(), None), &labels, false).is_none());
        assert!(softmax_targets(&mut learned, false).is_none());
        assert!(softmax_targets(&mut logits.to_kind(Kind::BFloat16), false).is_none());
        assert!(softmax_targets(&mut logits.tr(), false).is_none());
        assert!(softmax_targets(&mut logits.narrow(1, 0, 0).contiguous(), false).is_none());
    }

    /// Bit for bit what is found where each row has a copy of its own, and where rows lie apart from one another.
    #[test]
    fn rows_of_one_source_are_those_of_copies() {
        for vocab in [5, 1500] {
            let (draft, target) =
                (values(6, vocab, 0.37).to_kind(Kind::Float), values(3, vocab, 1.3).to_kind(Kind::Float));
            let labels = Tensor::from_slice(&[3_i64, 0, 1, 4, 2, 2]);
            let of = Tensor::from_slice(&[0_i64, 2, 2, 0, 2, 0]);
            let split_rows = |rows: &Tensor| {
                let mut wider =
                    Tensor::full([rows.size()[0], vocab + 3], f64::NAN, (Kind::Float, Device::Cpu))
                        .narrow(1, 1, vocab);
                wider.copy_(rows);
                wider
            };
            let (mut ours, mut copies) = (split_rows(&draft), draft.copy());
            let shared_target = weighed(split_rows(&target), Some(&of));
            let copied_target = weighed(target.index_select(0, &of), None);
            let shared = measure_rows(&mut ours, &shared_target, &labels, true).unwrap();
            let copied = measure_rows(&mut copies, &copied_target, &labels, true).unwrap();
            assert!(ours.equal(&copies));
            assert!(shared.ce.equal(&copied.ce) && shared.l1.equal(&copied.l1));
            assert!(shared.overlap.equal(&copied.overlap));
            let ((soft, divergence), (of_copies, and_divergence)) =
                (shared.soft.unwrap(), copied.soft.unwrap());
            assert!(soft.equal(&of_copies) && divergence.equal(&and_divergence));
            let factors = values(6, 3, 0.9).abs().to_kind(Kind::Float);
            assert!(logits_grad(&mut ours, &shared_target, &labels, &factors));
            assert!(logits_grad(&mut copies, &copied_target, &labels, &factors));
            assert!(ours.equal(&copies));
            // A source without rows has the sum 0, whatever lay there.
            let (mut sums, mut more) = (split_rows(&target), split_rows(&draft));
            sum_rows(&split_rows(&draft), &of, &mut sums);
            assert!(sums.equal(&target.zeros_like().index_add(0, &of, &draft)));
            add_to_rows(&mut more, &of, &sums);
            assert!(more.equal(&(&draft + sums.index_select(0, &of))));
        }
    }
}
