//! Fused operators over float32 rows on the CPU. libtorch would need two to nine operators for each. Their call
//! overhead dominates for few rows, and many rows keep intermediates for the backward.

use std::ffi::c_void;

use tch::Tensor;

use super::super::tensor_from_raw;

unsafe extern "C" {
    fn ds_rms_norm(x: *const c_void, weight: *const c_void, eps: f64) -> *mut c_void;
    fn ds_argmax(x: *const c_void) -> *mut c_void;
    fn ds_distributions(logits: *const c_void, temperatures: *const c_void) -> *mut c_void;
    fn ds_draw(weights: *const c_void, uniforms: *const c_void) -> *mut c_void;
    fn ds_rotate(x: *const c_void, cosines: *const c_void, sines: *const c_void) -> *mut c_void;
    fn ds_silu_times(gate: *const c_void, up: *const c_void) -> *mut c_void;
    fn ds_gated_product(gate: *const c_void, up: *const c_void, weight: *const c_void) -> *mut c_void;
}

/// `x / rms(x) · weight` over the last dimension of `x [.., d]`; `weight` is `[d]`. A row's bits do not depend on
/// other rows.
///
/// Returns None where libtorch's operators are used instead: other devices, dtypes or layouts. Double backward is not
/// supported.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Option<Tensor> {
    // SAFETY: the shim reads both tensors, and saves counted references for the backward, as libtorch's operators do.
    // It catches every C++ exception, and returns null or a new tensor.
    unsafe { tensor_from_raw(ds_rms_norm(x.as_ptr().cast(), weight.as_ptr().cast(), eps)) }
}

/// Argmax of each row, `[..]` int64 for `x [.., V]`; the first of equal values. Autograd records nothing.
///
/// Returns None for other devices, dtypes or layouts, and if a value is NaN.
pub fn argmax(x: &Tensor) -> Option<Tensor> {
    // SAFETY: as above.
    unsafe { tensor_from_raw(ds_argmax(x.as_ptr().cast())) }
}

/// softmax(logits / temperature) of contiguous `logits [n, V]` with n `temperatures`. A row's bits do not depend on
/// other rows.
///
/// None as for `rms_norm`, for gradients, for empty logits, and without a temperature for each row.
pub fn temperature_softmax(logits: &Tensor, temperatures: &Tensor) -> Option<Tensor> {
    // SAFETY: as above.
    unsafe { tensor_from_raw(ds_distributions(logits.as_ptr().cast(), temperatures.as_ptr().cast())) }
}

/// Samples a token from each row of contiguous, non-negative `weights [n, V]` with `uniforms [n]` float64. The token
/// is the first whose cumulative weight, in float64, exceeds uniform · total; else the last. Rows with NaN give token
/// 0. Returns `[n]` int64.
///
/// Returns None for other devices, dtypes or layouts, if a gradient is required, for empty weights, and without a
/// uniform for each row.
pub fn draw(weights: &Tensor, uniforms: &Tensor) -> Option<Tensor> {
    // SAFETY: as above.
    unsafe { tensor_from_raw(ds_draw(weights.as_ptr().cast(), uniforms.as_ptr().cast())) }
}

/// Rotates the planes (i, D/2 + i) of `x [N, heads, D]` by angles with these cosines and sines `[N, 1, D/2]`.
///
/// Returns None for other devices, dtypes or layouts. Also supports bfloat16 on a GPU if its kernels compile.
pub fn rotate(x: &Tensor, cosines: &Tensor, sines: &Tensor) -> Option<Tensor> {
    // SAFETY: as above.
    unsafe { tensor_from_raw(ds_rotate(x.as_ptr().cast(), cosines.as_ptr().cast(), sines.as_ptr().cast())) }
}

/// `silu(gate) ⊙ up`, of one shape.
///
/// Returns None for other devices, dtypes or layouts, and if a gradient is required. Supports bfloat16 on a GPU, with
/// gradients, if its kernels compile.
pub fn silu_times(gate: &Tensor, up: &Tensor) -> Option<Tensor> {
    // SAFETY: as above.
    unsafe { tensor_from_raw(ds_silu_times(gate.as_ptr().cast(), up.as_ptr().cast())) }
}

/// `(silu(gate) ⊙ up) Wᵀ` of `gate` and `up [.., d]` and `weight [outputs, d]`, for training. The backward recomputes
/// the matmul's input instead of saving it. The backward may add the gradient of a leaf weight to its `grad` itself,
/// as in [`super::projection`].
///
/// None as for `rms_norm`, and if no gradient is required.
pub fn gated_product(gate: &Tensor, up: &Tensor, weight: &Tensor) -> Option<Tensor> {
    // SAFETY: as above.
    unsafe {
        tensor_from_raw(ds_gated_product(gate.as_ptr().cast(), up.as_ptr().cast(), weight.as_ptr().cast()))
    }
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

    /// Tokens of weight 0 are never sampled, and samples equal those of libtorch's operators.
    #[test]
    fn draws_are_where_cumulated_weights_pass_the_uniform() {
        for (rows, vocab) in [(1, 1), (3, 7), (4, 256), (9, 257), (6, 3000)] {
            let logits = values(&[rows, vocab]) * 5.0;
            let temperatures = Tensor::arange(rows, (Kind::Float, Device::Cpu)) * 0.3 + 0.5;
            let found = temperature_softmax(&logits, &temperatures).unwrap();
            let exact = (logits.to_kind(Kind::Double) / temperatures.to_kind(Kind::Double).unsqueeze(1))
                .softmax(-1, Kind::Double);
            assert!(found.to_kind(Kind::Double).allclose(&exact, 4e-6, 1e-9, false), "{rows} of {vocab}");
            for row in 0..rows {
                let alone =
                    temperature_softmax(&logits.narrow(0, row, 1), &temperatures.narrow(0, row, 1)).unwrap();
                assert!(alone.equal(&found.narrow(0, row, 1)), "row {row} of {rows}");
            }
            let weights = &found * found.ge(1.0 / vocab as f64).to_kind(Kind::Float);
            for step in 0..50 {
                // Every second value, so that uniforms are not contiguous.
                let uniforms = (Tensor::arange(2 * rows, (Kind::Double, Device::Cpu)) * 0.37 + step) * 0.731;
                let uniforms = uniforms.frac().view([rows, 2]).select(1, 0);
                let drawn = draw(&weights, &uniforms).unwrap();
                let sums = weights.cumsum(-1, Kind::Double);
                let all = sums.narrow(1, vocab - 1, 1);
                let passed = sums.le_tensor(&(all * uniforms.unsqueeze(1)));
                let expected = passed.sum_dim_intlist(-1, false, Kind::Int64).clamp_max(vocab - 1);
                assert_eq!(drawn, expected, "{rows} of {vocab}, {step}");
                let weighed = weights.gather(1, &drawn.unsqueeze(1), false);
                assert!(weighed.gt(0.0).all().int64_value(&[]) != 0, "drawn without a weight");
            }
        }
        let lost = Tensor::from_slice(&[0.5f32, f32::NAN, 0.5]).view([1, 3]);
        assert_eq!(draw(&lost, &Tensor::from_slice(&[0.9])).unwrap(), Tensor::from_slice(&[0_i64]));
        assert!(draw(&lost, &Tensor::from_slice(&[0.9f32])).is_none(), "uniforms of another kind");
        assert!(draw(&lost, &Tensor::from_slice(&[0.1, 0.2])).is_none(), "more uniforms than rows");
        let one = Tensor::from_slice(&[1.0f32]);
        assert!(temperature_softmax(&lost, &one).unwrap().isnan().all().int64_value(&[]) != 0);
        assert!(temperature_softmax(&lost, &one.repeat([2])).is_none(), "more temperatures than rows");
    }

    #[test]
    fn rows_are_normed_as_libtorch_norms_them() {
        // Widths with and without a partial vector; few rows, and more than one thread's share.
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

    /// One implementation of an operator, given its inputs.
    type Form<'a> = &'a dyn Fn(&[Tensor]) -> Tensor;

    /// Checks that value and gradients of `found` are as close to float64 as libtorch's float32 operators. Covers all
    /// gradients and each alone. The last `fixed` inputs have none.
    fn assert_as_exact(found: Form, expected: Form, inputs: &[Tensor], fixed: usize) {
        let learned = inputs.len() - fixed;
        for only in (0..learned).map(Some).chain([None]) {
            let learns = |i: usize| i < learned && only.is_none_or(|only| only == i);
            // The value, then the gradients.
            let run = |form: Form, kind: Kind| {
                let inputs: Vec<Tensor> = inputs.iter().map(|t| t.to_kind(kind).detach().copy()).collect();
                let inputs: Vec<Tensor> =
                    inputs.iter().enumerate().map(|(i, t)| t.set_requires_grad(learns(i))).collect();
                let y = form(&inputs);
                // A gradient that is not contiguous, as from transposed matmuls.
                let rows = y.size()[0];
                let slope = (values(&[rows, y.numel() as i64 / rows]) * 2.0).cos().to_kind(kind);
                let slope = slope.tr().contiguous().tr().reshape(y.size());
                (&y * slope).sum(kind).backward();
                let slopes = (0..learned).filter(|&i| learns(i)).map(|i| inputs[i].grad());
                [y.detach()].into_iter().chain(slopes).collect::<Vec<_>>()
            };
            let (exact, theirs) = (run(expected, Kind::Double), run(expected, Kind::Float));
            for ((exact, theirs), found) in exact.iter().zip(&theirs).zip(&run(found, Kind::Float)) {
                let off = |t: &Tensor| (t - exact).abs().max().double_value(&[]);
                let most = exact.abs().max().double_value(&[]).max(1.0);
                let allowed = (2.0 * off(theirs)).max(1e-6 * most);
                assert!(off(found) <= allowed, "off by {}, libtorch by {}", off(found), off(theirs));
            }
        }
    }

    #[test]
    fn gradients_of_norms_are_libtorchs() {
        for (rows, width) in [(1, 48), (8, 192), (3, 5), (700, 100)] {
            let inputs = [values(&[rows, width]) * 3.0, values(&[width]) + 2.0];
            assert_as_exact(
                &|t| rms_norm(&t[0], &t[1], 1e-6).unwrap(),
                &|t| t[0].rms_norm([width], Some(&t[1]), 1e-6),
                &inputs,
                0,
            );
        }
    }

    #[test]
    fn gates_are_libtorchs() {
        for (rows, width) in [(1, 48), (8, 512), (3, 5), (300, 130)] {
            // Includes gates where the exponential underflows.
            let (gate, up) = (values(&[rows, width]) * 120.0, (values(&[rows, width]) + 0.3) * 2.0);
            let found = silu_times(&gate, &up).unwrap();
            assert!(found.allclose(&(gate.silu() * &up), 1e-6, 1e-4, false));
            for row in [0, rows - 1] {
                let [gate, up] = [&gate, &up].map(|t| t.narrow(0, row, 1));
                assert!(silu_times(&gate, &up).unwrap().equal(&found.narrow(0, row, 1)), "{row} of {rows}");
            }
        }
    }

    #[test]
    fn gated_products_and_their_gradients_are_libtorchs() {
        let shapes: [(&[i64], i64); 5] =
            [(&[1, 48], 3), (&[8, 512], 100), (&[3, 5], 7), (&[300, 130], 20), (&[2, 3, 40], 5)];
        for (shape, outputs) in shapes {
            let gate = values(shape) * 120.0;
            let weight = values(&[outputs, shape[shape.len() - 1]]);
            let inputs = [gate, (values(shape) + 0.3) * 2.0, weight];
            assert_as_exact(
                &|t| gated_product(&t[0], &t[1], &t[2]).unwrap(),
                &|t| (t[0].silu() * &t[1]).linear(&t[2], None::<&Tensor>),
                &inputs,
                0,
            );
        }
    }

    #[test]
    fn planes_are_turned() {
        for (rows, heads, dim) in [(8, 6, 48), (1, 1, 2), (400, 3, 64)] {
            let (x, angles) = (values(&[rows, heads, dim]), values(&[rows, 1, dim / 2]) * 5.0);
            let (c, s) = (angles.cos(), angles.sin());
            let composed: Form = &|t| {
                let (a, b) = (t[0].narrow(2, 0, dim / 2), t[0].narrow(2, dim / 2, dim / 2));
                Tensor::cat(&[&a * &t[1] - &b * &t[2], &b * &t[1] + a * &t[2]], 2)
            };
            assert_as_exact(&|t| rotate(&t[0], &t[1], &t[2]).unwrap(), composed, &[x, c, s], 2);
        }
    }

    #[test]
    fn the_largest_is_found_and_of_several_the_first() {
        for (rows, width) in [(1, 1), (3, 5), (16, 1024), (7, 16), (40, 1003)] {
            let x = values(&[rows, width]) * (rows as f64);
            // Includes rows with many equal values.
            for x in [x.shallow_clone(), x.round(), x.full_like(f64::NEG_INFINITY)] {
                let found = argmax(&x).unwrap();
                assert_eq!(found, x.argmax(-1, false), "{rows} of {width}");
                let first = x.eq_tensor(&x.amax([-1], true)).to_kind(Kind::Int64).argmax(-1, false);
                assert_eq!(found, first, "{rows} of {width}");
            }
        }
        assert_eq!(argmax(&values(&[2, 3, 8])).unwrap().size(), [2, 3]);
        assert_eq!(argmax(&values(&[8])).unwrap().size(), [] as [i64; 0]);
        let odd = Tensor::from_slice(&[1.0f32, f32::NAN, 2.0]);
        assert!(argmax(&odd).is_none() && argmax(&odd.view([3, 1])).is_none());
    }

    #[test]
    fn what_they_are_not_made_for_is_left_to_libtorch() {
        let (x, weight) = (values(&[4, 8]), values(&[8]));
        assert!(argmax(&x.tr()).is_none() && argmax(&x.narrow(0, 0, 0)).is_none());
        assert!(argmax(&x.to_kind(Kind::Double)).is_none());
        assert!(rms_norm(&x.to_kind(Kind::BFloat16), &weight, 1e-6).is_none());
        assert!(
            rms_norm(&x.tr(), &values(&[4]), 1e-6).is_none() && rms_norm(&x, &values(&[4]), 1e-6).is_none()
        );
        let cosines = values(&[4, 1, 4]);
        assert!(rotate(&values(&[4, 2, 7]), &cosines, &cosines).is_none());
        assert!(rotate(&values(&[5, 2, 8]), &cosines, &cosines).is_none());
        let learned = cosines.copy().set_requires_grad(true);
        assert!(rotate(&values(&[4, 2, 8]), &learned, &cosines).is_none());
        assert!(silu_times(&x, &values(&[2, 16])).is_none() && silu_times(&x.tr(), &x.tr()).is_none());
        let (learned, weight) = (x.copy().set_requires_grad(true), values(&[3, 8]));
        assert!(silu_times(&x, &learned).is_none() && gated_product(&x, &x, &weight).is_none());
        assert!(gated_product(&x, &learned, &values(&[3, 7])).is_none());
    }
}
