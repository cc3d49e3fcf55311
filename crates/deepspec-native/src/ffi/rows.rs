//! Operators over float32 rows on the CPU, each in one pass; libtorch makes them of six to nine operators, and a few rows cost
//! little else than their number.

use std::ffi::c_void;

use tch::Tensor;

unsafe extern "C" {
    fn ds_rms_norm(x: *const c_void, weight: *const c_void, eps: f64) -> *mut c_void;
    fn ds_rotate(x: *const c_void, cosines: *const c_void, sines: *const c_void) -> *mut c_void;
}

/// `x / rms(x) · weight` over the last dimension of `x [.., d]`; `weight [d]`. A row's bits do not depend on the other rows.
///
/// None where libtorch's own operators are to be taken: for gradients, on other devices, of other kinds or layouts.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Option<Tensor> {
    // SAFETY: the shim reads both tensors during the call only, catches every C++ exception, and returns null or a tensor of its own.
    unsafe { owned(ds_rms_norm(x.as_ptr().cast(), weight.as_ptr().cast(), eps)) }
}

/// Turns the planes (i, D/2 + i) of `x [N, heads, D]` by angles whose cosines and sines are `[N, 1, D/2]`.
///
/// None as for [`rms_norm`].
pub fn rotate(x: &Tensor, cosines: &Tensor, sines: &Tensor) -> Option<Tensor> {
    // SAFETY: as above.
    unsafe { owned(ds_rotate(x.as_ptr().cast(), cosines.as_ptr().cast(), sines.as_ptr().cast())) }
}

/// # Safety
/// `made` is null or a tensor from `new` that belongs to nobody else.
unsafe fn owned(made: *mut c_void) -> Option<Tensor> {
    // SAFETY: by this function's own contract; tch frees it by `delete`.
    (!made.is_null()).then(|| unsafe { Tensor::from_ptr(made.cast()) })
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn values(shape: &[i64]) -> Tensor {
        let count = shape.iter().product::<i64>();
        (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.7).sin().view(shape)
    }

    fn assert_close(found: &Tensor, expected: &Tensor) {
        assert!(found.allclose(expected, 1e-6, 1e-6, false), "{found} instead of {expected}");
    }

    #[test]
    fn rows_are_normed_as_libtorch_norms_them() {
        // Widths with and without a rest behind the lanes; few rows, and more than one thread's worth.
        for (rows, width) in [(1, 48), (8, 192), (3, 5), (700, 100)] {
            let (x, weight) = (values(&[rows, width]) * 3.0, values(&[width]) + 2.0);
            let found = rms_norm(&x, &weight, 1e-6).unwrap();
            assert_close(&found, &x.rms_norm([width], Some(&weight), 1e-6));
            for row in [0, rows - 1] {
                let alone = rms_norm(&x.narrow(0, row, 1), &weight, 1e-6).unwrap();
                assert!(alone.equal(&found.narrow(0, row, 1)), "row {row} of {rows}");
            }
        }
    }

    #[test]
    fn planes_are_turned() {
        for (rows, heads, dim) in [(8, 6, 48), (1, 1, 2), (400, 3, 64)] {
            let (x, angles) = (values(&[rows, heads, dim]), values(&[rows, 1, dim / 2]) * 5.0);
            let (c, s) = (angles.cos(), angles.sin());
            let (a, b) = (x.narrow(2, 0, dim / 2), x.narrow(2, dim / 2, dim / 2));
            let expected = Tensor::cat(&[&a * &c - &b * &s, &b * &c + &a * &s], 2);
            assert!(rotate(&x, &c, &s).unwrap().equal(&expected), "{rows} rows");
        }
    }

    #[test]
    fn what_they_are_not_made_for_is_left_to_libtorch() {
        let (x, weight) = (values(&[4, 8]), values(&[8]));
        let with_gradient = weight.copy().set_requires_grad(true);
        assert!(rms_norm(&x, &with_gradient, 1e-6).is_none());
        assert!(tch::no_grad(|| rms_norm(&x, &with_gradient, 1e-6)).is_some());
        assert!(rms_norm(&x.to_kind(Kind::BFloat16), &weight, 1e-6).is_none());
        assert!(
            rms_norm(&x.tr(), &values(&[4]), 1e-6).is_none() && rms_norm(&x, &values(&[4]), 1e-6).is_none()
        );
        let cosines = values(&[4, 1, 4]);
        assert!(rotate(&values(&[4, 2, 7]), &cosines, &cosines).is_none());
        assert!(rotate(&values(&[5, 2, 8]), &cosines, &cosines).is_none());
    }
}
