//! Losses of logits, in place: float32 on the CPU, and bfloat16 on a GPU.

use std::ffi::{c_char, c_void};
use std::ptr;

use tch::Tensor;

use super::super::args::{LogitRows, RowDistances, TargetProbs};
use super::super::c10d::check;
use super::super::tensor_from_raw;

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

/// Result of [`LogitRows::measure`]: one column per distance, and columns for the gradients.
pub struct MeasuredLogits {
    found: Tensor, // [n, 9] float32
}

impl LogitRows<'_> {
    /// Measures the rows without changing them.
    ///
    /// None if no kernels exist: on the CPU, for other dtypes or layouts, and without a GPU driver or compiler.
    pub fn measure(&self) -> Option<MeasuredLogits> {
        let Self { base, bias, target, source_of_row, labels, cap } = self;
        // SAFETY: the kernels read the tensors on the thread's stream, and libtorch does not reuse their memory
        // before that. Two of the pointers may be null. The caller vouches for the values of labels and sources. The
        // shim catches every C++ exception, and returns null or a new tensor.
        let found = unsafe {
            tensor_from_raw(ds_measure_logits(
                base.as_ptr().cast(),
                optional_pointer(*bias),
                target.as_ptr().cast(),
                optional_pointer(*source_of_row),
                labels.as_ptr().cast(),
                cap.unwrap_or(0.0),
            ))
        };
        found.map(|found| MeasuredLogits { found })
    }

    /// Overwrites measured logits with gradients: the bias if there is one, and the base without a bias or with a
    /// soft-cap. [`logits_grad`] describes `factors [n, 3]`.
    ///
    /// # Panics
    /// If the rows do not match the measured ones, or with the driver's message.
    pub fn backward(self, measured: &MeasuredLogits, factors: &Tensor) {
        let Self { base, bias, target, source_of_row, labels, cap } = self;
        // SAFETY: as above. Only the caller owns the rows that the kernel writes.
        let problem = unsafe {
            ds_slope_logits(
                base.as_ptr().cast(),
                optional_pointer(bias),
                target.as_ptr().cast(),
                optional_pointer(source_of_row),
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

impl MeasuredLogits {
    /// The distances of all rows, including the soft cross entropy and the KL divergence.
    pub fn distances(&self) -> RowDistances {
        let column = |column: i64| self.found.narrow(1, column, 1);
        RowDistances { ce: column(2), l1: column(3), overlap: column(4), soft: Some((column(5), column(6))) }
    }

    /// 1 where drafter and target have the same argmax, `[n, 1]`.
    pub fn agreement(&self) -> Tensor {
        self.found.narrow(1, 7, 1)
    }
}

fn optional_pointer(tensor: Option<&Tensor>) -> *const c_void {
    tensor.map_or(ptr::null(), |tensor| tensor.as_ptr().cast())
}

/// Turns target logits `[S, V]` into probabilities, in place. Returns their entropies, `[S]` float64, or zeros
/// without `entropies`.
///
/// Returns None and changes nothing on other devices, for other dtypes or layouts, for empty logits, and if a gradient
/// is required.
pub fn softmax_targets(logits: &mut Tensor, entropies: bool) -> Option<Tensor> {
    // SAFETY: the shim writes to the rows, which only the caller owns, during the call. It catches every C++
    // exception, and returns null or a new tensor.
    unsafe { tensor_from_raw(ds_weigh_target(logits.as_ptr().cast(), entropies)) }
}

/// Turns drafter logits `draft [n, V]` into probabilities in place, and compares them with the target and
/// `labels [n]`. The tensors share no memory.
///
/// Returns None and changes nothing where [`softmax_targets`] returns None, if sizes do not match, or if a label or
/// source is out of range.
pub fn measure_rows(
    draft: &mut Tensor,
    target: &TargetProbs,
    labels: &Tensor,
    soft: bool,
) -> Option<RowDistances> {
    // SAFETY: the shim writes only to the drafter's rows, and reads the other tensors during the call. One pointer
    // may be null. The shim catches every C++ exception, and returns null or a new tensor.
    let found = unsafe {
        tensor_from_raw(ds_measure_rows(
            draft.as_ptr().cast(),
            target.probabilities.as_ptr().cast(),
            target.entropies.as_ptr().cast(),
            optional_pointer(target.source_of_row.as_ref()),
            labels.as_ptr().cast(),
            soft,
        ))?
    };
    let column = |column: i64| found.narrow(1, column, 1);
    Some(RowDistances {
        ce: column(0),
        l1: column(1),
        overlap: column(2),
        soft: soft.then(|| (column(3), column(4))),
    })
}

/// Overwrites row s of `sums [S, V]` with the sum of the `rows [n, V]` whose `source_of_row [n]` int64 is s. The
/// tensors share no memory.
///
/// Returns false and changes nothing for other devices, dtypes or layouts, and if sizes or sources do not match.
pub fn sum_rows(rows: &Tensor, source_of_row: &Tensor, sums: &mut Tensor) -> bool {
    // SAFETY: the shim writes only to `sums`, which only the caller owns, and reads the others during the call. It
    // catches every C++ exception.
    unsafe { ds_sum_rows(rows.as_ptr().cast(), source_of_row.as_ptr().cast(), sums.as_ptr().cast()) }
}

/// Adds row `source_of_row[i]` of `values [S, V]` to row i of `rows [n, V]`; `source_of_row` is `[n]` int64. The
/// tensors share no memory.
///
/// False without any change: as for [`sum_rows`].
pub fn add_to_rows(rows: &mut Tensor, source_of_row: &Tensor, values: &Tensor) -> bool {
    // SAFETY: the shim writes only to `rows`, which only the caller owns, and reads the others during the call. It
    // catches every C++ exception.
    unsafe { ds_add_to_rows(rows.as_ptr().cast(), source_of_row.as_ptr().cast(), values.as_ptr().cast()) }
}

/// Turns the probabilities `draft [n, V]` of [`measure_rows`] into gradients by the logits. `factors [n, 3]` scale
/// p^d − onehot(x*), p^d − p^t and ∂‖p^d − p^t‖₁. Returns whether it did; true after [`measure_rows`].
pub fn logits_grad(draft: &mut Tensor, target: &TargetProbs, labels: &Tensor, factors: &Tensor) -> bool {
    // SAFETY: the shim writes only to `draft`, and reads the others during the call. One pointer may be null. The
    // shim catches every C++ exception.
    unsafe {
        ds_slope_rows(
            draft.as_ptr().cast(),
            target.probabilities.as_ptr().cast(),
            optional_pointer(target.source_of_row.as_ref()),
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

    /// Turns target logits into the input of `measure_rows`.
    fn weighed(mut logits: Tensor, source_of_row: Option<&Tensor>) -> TargetProbs {
        let entropies = softmax_targets(&mut logits, true).unwrap();
        TargetProbs {
            probabilities: logits,
            entropies,
            source_of_row: source_of_row.map(Tensor::shallow_clone),
        }
    }

    /// Compares with formulas in float64 and with autograd's gradients.
    #[test]
    fn distances_and_gradients_are_those_of_the_formulas() {
        // Fewer tokens than lanes, a partial vector at the end, several spans of sums; more rows than one thread's
        // share.
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

    /// A diverged run must not look like a converged one.
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
                // A target term with factor 0 adds no NaN to the gradient.
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

    /// Shared target rows give the same bits as copies; rows may be strided.
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
            // A source without rows gets the sum 0, whatever `sums` held.
            let (mut sums, mut more) = (split_rows(&target), split_rows(&draft));
            sum_rows(&split_rows(&draft), &of, &mut sums);
            assert!(sums.equal(&target.zeros_like().index_add(0, &of, &draft)));
            add_to_rows(&mut more, &of, &sums);
            assert!(more.equal(&(&draft + sums.index_select(0, &of))));
        }
    }
}
