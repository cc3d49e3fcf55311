//! What losses ask of rows of float32 logits on the CPU, in one to three passes over a row.

use std::ffi::c_void;

use tch::Tensor;

use super::rows::owned;

unsafe extern "C" {
    fn ds_normalise_rows(x: *mut c_void) -> *mut c_void;
    fn ds_row_differences(p: *const c_void, q: *const c_void) -> *mut c_void;
    fn ds_tilt_rows(p: *mut c_void, q: *const c_void, rise: *const c_void, factor: *const c_void) -> i32;
}

/// e^x / Σ e^x in place of the rows of logits `x [n, V]`: `[n, 2]`, the largest logit of each row and log Σ e^(x − that).
///
/// None, with x as it was, where libtorch's own operators are to be taken: for gradients, on other devices, of other kinds or layouts.
pub fn normalise_rows(x: &mut Tensor) -> Option<Tensor> {
    // SAFETY: the shim writes within x, which is borrowed mutably, during the call only, catches every C++ exception, which arise before it writes,
    // and returns null or a tensor of its own.
    unsafe { owned(ds_normalise_rows(x.as_mut_ptr().cast())) }
}

/// Of the rows of `p` and `q`, `[n, V]` both: `[n, 2]`, Σ |p − q| and Σ p·sign(p − q).
///
/// None as for [`normalise_rows`].
pub fn row_differences(p: &Tensor, q: &Tensor) -> Option<Tensor> {
    // SAFETY: the shim reads both during the call only, catches every C++ exception, and returns null or a tensor of its own.
    unsafe { owned(ds_row_differences(p.as_ptr().cast(), q.as_ptr().cast())) }
}

/// p · (rise·sign(p − q) + factor) in place of the rows `p [n, V]`, with `q [n, V]`, `rise [n, 1]` and `factor [n, 1]`; whether that was done, which it
/// is not where [`normalise_rows`] gives None.
pub fn tilt_rows(p: &mut Tensor, q: &Tensor, rise: &Tensor, factor: &Tensor) -> bool {
    let (rise, factor) = (rise.as_ptr().cast(), factor.as_ptr().cast());
    // SAFETY: the shim checks all shapes, writes within p, which is borrowed mutably, and reads the others during the call only; it catches every
    // C++ exception, which arise before it writes.
    unsafe { ds_tilt_rows(p.as_mut_ptr().cast(), q.as_ptr().cast(), rise, factor) != 0 }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn logits(rows: i64, width: i64, seed: f64) -> Tensor {
        (Tensor::arange(rows * width, (Kind::Float, Device::Cpu)) * 0.37 + seed).sin().view([rows, width])
            * 9.0
    }

    fn assert_close(found: &Tensor, expected: &Tensor) {
        assert!(found.allclose(expected, 1e-5, 1e-7, false), "{found} instead of {expected}");
    }

    /// Widths with and without a rest behind the lanes; one row, and more than one thread's worth.
    #[test]
    fn rows_are_measured_as_libtorch_measures_them() {
        for (rows, width) in [(1, 64), (3, 1), (5, 130), (700, 100)] {
            let (x, y) = (logits(rows, width, 0.1) + 30.0, logits(rows, width, 2.0));
            let (mut p, mut q) = (x.copy(), y.copy());
            let found = normalise_rows(&mut p).unwrap();
            let _ = normalise_rows(&mut q).unwrap();
            assert_close(&p, &x.softmax(-1, Kind::Float));
            assert_close(&(found.narrow(1, 0, 1) + found.narrow(1, 1, 1)), &x.logsumexp([-1], true));
            assert!(found.narrow(1, 0, 1).equal(&x.amax(-1, true)));

            // Rows in which both agree somewhere.
            let _ = q.narrow(1, 0, 1).copy_(&p.narrow(1, 0, 1));
            let (difference, sign) = (&p - &q, (&p - &q).sign());
            let found = row_differences(&p, &q).unwrap();
            let sum = |x: Tensor| x.sum_dim_intlist(-1, true, Kind::Float);
            assert_close(&found, &Tensor::cat(&[sum(difference.abs()), sum(&p * &sign)], 1));
            let (rise, factor) = (logits(rows, 1, 0.3), logits(rows, 1, 4.0));
            let expected = &p * (&rise * sign + &factor);
            assert!(tilt_rows(&mut p, &q, &rise, &factor));
            assert_close(&p, &expected);
        }
    }

    /// −∞ has no probability, and a row that is not finite stays so instead of becoming something that looks right.
    #[test]
    fn logits_that_are_not_finite_are_as_in_libtorch() {
        let x = Tensor::from_slice(&[0.5f32, f32::NEG_INFINITY, 1.0, 200.0, 0.0, -200.0]).view([2, 3]);
        let mut p = x.copy();
        let _ = normalise_rows(&mut p).unwrap();
        assert_close(&p, &x.softmax(-1, Kind::Float));
        // Within the lanes and behind them.
        for (place, wrong) in [(3, f64::NAN), (129, f64::NAN), (3, f64::INFINITY), (129, f64::INFINITY)] {
            let mut row = logits(1, 130, 0.0);
            let _ = row.narrow(1, place, 1).fill_(wrong);
            let found = normalise_rows(&mut row).unwrap();
            assert!(row.isnan().any().int64_value(&[]) == 1, "{wrong} at {place}");
            assert!(found.narrow(1, 1, 1).isnan().all().int64_value(&[]) == 1, "{wrong} at {place}");
        }
        let mut nothing = logits(1, 130, 0.0).fill_(f64::NEG_INFINITY);
        let _ = normalise_rows(&mut nothing).unwrap();
        assert!(nothing.isnan().all().int64_value(&[]) == 1);
    }

    #[test]
    fn what_they_are_not_made_for_is_left_to_libtorch() {
        let x = logits(4, 8, 0.0);
        assert!(
            normalise_rows(&mut x.to_kind(Kind::BFloat16)).is_none() && normalise_rows(&mut x.tr()).is_none()
        );
        let mut learning = x.copy().set_requires_grad(true);
        assert!(normalise_rows(&mut learning).is_none() && row_differences(&learning, &x).is_none());
        assert!(row_differences(&x, &logits(4, 7, 0.0)).is_none());
        let (row, rows) = (logits(1, 1, 0.0), logits(4, 1, 0.0));
        assert!(!tilt_rows(&mut x.copy(), &x, &row, &rows) && !tilt_rows(&mut x.copy(), &x, &rows, &row));
    }
}
