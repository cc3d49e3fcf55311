//! Matmuls of float32 matrices for training on CPUs where libtorch's matmul is slow.

use std::ffi::{c_char, c_void};

use tch::Tensor;

use super::super::c10d::check;
use super::super::tensor_from_raw;

unsafe extern "C" {
    fn ds_multiplies() -> bool;
    fn ds_multiply(
        a: *const c_void,
        b: *const c_void,
        out: *const c_void,
        add: bool,
        done: *mut bool,
    ) -> *mut c_char;
    fn ds_projection(x: *const c_void, weight: *const c_void) -> *mut c_void;
}

/// `a b` of `a [m, k]` and `b [k, n]`, with any strides. The product overwrites `out [m, n]`, or is added to it.
/// `out` shares no memory with the inputs, and no tensor belongs to a graph.
///
/// False without any change: where libtorch's matmul is faster, and for tensors other than float32 matrices on the
/// CPU.
pub fn matmul_into(a: &Tensor, b: &Tensor, out: &mut Tensor, add: bool) -> bool {
    prefers_own_matmul() && try_multiply(a, b, out, add)
}

/// Whether the shim's matmuls are the faster choice on this processor.
pub(super) fn prefers_own_matmul() -> bool {
    // SAFETY: the shim only queries the processor.
    unsafe { ds_multiplies() }
}

/// [`matmul_into`] on any processor with AVX2; false if the shim does not support the tensors or the processor.
fn try_multiply(a: &Tensor, b: &Tensor, out: &mut Tensor, add: bool) -> bool {
    let mut done = false;
    let [a, b, out] = [a, b, out].map(|tensor| tensor.as_ptr().cast());
    // SAFETY: the shim reads a and b and writes to `out`, during the call only. It checks dtypes, sizes and strides,
    // and catches every C++ exception.
    if let Err(problem) = check(unsafe { ds_multiply(a, b, out, add, &mut done) }) {
        panic!("a product of matrices: {problem}");
    }
    done
}

/// `x Wᵀ` over the last dimension of `x [.., input]`, for training; `weight` is `[output, input]`.
///
/// Returns None where libtorch's matmul is used instead: other devices, dtypes or layouts, small products, no gradient
/// required, AVX-512, or no AVX2. Double backward is not supported. The backward may add the gradient of a leaf weight
/// to its `grad` itself, so `autograd.grad` does not return it.
pub fn projection(x: &Tensor, weight: &Tensor) -> Option<Tensor> {
    if prefers_own_matmul() { projection_here(x, weight) } else { None }
}

/// [`projection`] on any processor with AVX2.
fn projection_here(x: &Tensor, weight: &Tensor) -> Option<Tensor> {
    // SAFETY: the shim reads both tensors, and saves counted references for the backward, as libtorch's operators do.
    // It catches every C++ exception, and returns null or a new tensor.
    unsafe { tensor_from_raw(ds_projection(x.as_ptr().cast(), weight.as_ptr().cast())) }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn values(shape: &[i64], seed: f64) -> Tensor {
        let count = shape.iter().product::<i64>();
        (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.7 + seed).sin().view(shape)
    }

    /// The matrix itself, in column-major order, or as a slice of a wider matrix.
    fn lying(matrix: &Tensor, way: usize) -> Tensor {
        match way {
            0 => matrix.shallow_clone(),
            1 => matrix.tr().contiguous().tr(),
            _ => Tensor::cat(&[matrix, matrix], 1).narrow(1, 0, matrix.size()[1]),
        }
    }

    fn assert_product(found: &Tensor, exact: &Tensor, what: &str) {
        let off = (found.to_kind(Kind::Double) - exact).abs().max().double_value(&[]);
        let most = exact.abs().max().double_value(&[]).max(1.0);
        assert!(off <= 2e-6 * most, "{what}: off by {off:e} of {most}");
    }

    #[test]
    fn matrices_are_multiplied_however_they_lie() {
        // Single values, partial panels and blocks, and more than one block of each.
        for [m, k, n] in [[1, 1, 1], [7, 3, 17], [6, 256, 16], [200, 600, 40], [193, 257, 1030], [12, 9, 1]] {
            let (a, b) = (values(&[m, k], 0.0), values(&[k, n], 1.0));
            let exact = a.to_kind(Kind::Double).mm(&b.to_kind(Kind::Double));
            for (of_a, of_b) in (0..9).map(|way| (way / 3, way % 3)) {
                let what = format!("{m} × {k} × {n}, lying as {of_a} and {of_b}");
                let (a, b) = (lying(&a, of_a), lying(&b, of_b));
                let wider = Tensor::full([m, n + 5], 7.0, (Kind::Float, Device::Cpu));
                let mut out = wider.narrow(1, 2, n);
                assert!(try_multiply(&a, &b, &mut out, false), "this processor has no AVX2");
                assert_product(&out, &exact, &what);
                let once = out.copy();
                assert!(try_multiply(&a, &b, &mut out, true));
                assert_product(&out, &(&exact * 2.0), &what);
                let beside = wider.index_select(1, &Tensor::from_slice(&[0i64, 1, n + 2, n + 4]));
                assert!(beside.eq(7.0).all().int64_value(&[]) == 1, "{what}: written beside it");
                // A row's bits do not depend on other rows.
                let mut last = Tensor::empty([1, n], (Kind::Float, Device::Cpu));
                assert!(try_multiply(&a.narrow(0, m - 1, 1), &b, &mut last, false));
                assert!(last.equal(&once.narrow(0, m - 1, 1)), "{what}: the last row alone");
            }
        }
    }

    #[test]
    fn threads_change_no_bit_of_a_product() {
        let before = tch::get_num_threads();
        for [m, k, n] in [[300, 700, 90], [64, 512, 2000]] {
            let (a, b) = (values(&[m, k], 0.0), values(&[k, n], 1.0));
            let [one, three] = [1, 3].map(|threads| {
                tch::set_num_threads(threads);
                let mut out = Tensor::empty([m, n], (Kind::Float, Device::Cpu));
                assert!(try_multiply(&a, &b, &mut out, false));
                out
            });
            assert!(one.equal(&three), "{m} × {k} × {n}");
        }
        tch::set_num_threads(before);
    }

    #[test]
    fn what_is_no_product_of_float_matrices_is_left_to_libtorch() {
        let (a, b) = (values(&[8, 16], 0.0), values(&[16, 32], 1.0));
        let mut out = values(&[8, 32], 2.0);
        assert!(!try_multiply(&a.to_kind(Kind::Double), &b, &mut out, false));
        assert!(!try_multiply(&a, &b.tr(), &mut out, false));
        assert!(!try_multiply(&a, &b, &mut values(&[32, 8], 0.0).tr(), false));
        assert!(!try_multiply(&a, &b, &mut values(&[9, 32], 0.0), false));
        assert!(!try_multiply(&a.narrow(1, 0, 0), &b.narrow(0, 0, 0), &mut out, false));
        assert!(out.equal(&values(&[8, 32], 2.0)));
        // Sums of bfloat16 products are float32.
        let narrow = |tensor: &Tensor| tensor.to_kind(Kind::BFloat16);
        crate::linear::matmul_into(&narrow(&a), &narrow(&b), &mut out, true);
        let expected = narrow(&a).mm(&narrow(&b)).to_kind(Kind::Float) + values(&[8, 32], 2.0);
        assert!(out.equal(&expected));
    }

    #[test]
    fn projections_have_the_gradients_of_libtorchs() {
        for (shape, outputs) in [([2, 100, 48], 70), ([1, 300, 257], 16), ([5, 7, 192], 9)] {
            for (learns_x, learns_w) in [(true, true), (true, false), (false, true)] {
                let width = shape[2];
                let run = |kind: Kind, product: &dyn Fn(&Tensor, &Tensor) -> Tensor| {
                    let of = |tensor: Tensor, learns| tensor.to_kind(kind).detach().set_requires_grad(learns);
                    let (x, w) =
                        (of(values(&shape, 0.0), learns_x), of(values(&[outputs, width], 1.0), learns_w));
                    let y = product(&x, &w);
                    // A gradient that is not contiguous.
                    let slope = values(&[outputs, shape[0] * shape[1]], 2.0).to_kind(kind).tr();
                    (&y * slope.reshape(y.size())).sum(kind).backward();
                    let slopes = [(x, learns_x), (w, learns_w)].into_iter().filter(|(_, learns)| *learns);
                    [y.detach()].into_iter().chain(slopes.map(|(of, _)| of.grad())).collect::<Vec<_>>()
                };
                let exact = run(Kind::Double, &|x, w| x.linear(w, None::<&Tensor>));
                let found = run(Kind::Float, &|x, w| projection_here(x, w).unwrap());
                for (found, exact) in found.iter().zip(&exact) {
                    assert_product(found, exact, &format!("{shape:?} to {outputs}"));
                }
            }
        }
        // A weight has two uses, with more rows than one chain of sums. A missing `grad` and a zeroed one give equal
        // gradients, and each backward adds.
        let (x, longer) = (values(&[300, 48], 0.0), values(&[600, 48], 0.5));
        let backward = |w: &Tensor| {
            let product = |x: &Tensor| projection_here(x, w).unwrap().square().sum(Kind::Float);
            (product(&x) + product(&longer)).backward();
        };
        let of = || values(&[70, 48], 1.0).set_requires_grad(true);
        let (fresh, mut zeroed) = (of(), of());
        backward(&fresh);
        backward(&zeroed);
        zeroed.zero_grad();
        backward(&zeroed);
        assert!(fresh.grad().equal(&zeroed.grad()));
        let once = fresh.grad().copy();
        backward(&fresh);
        assert!(fresh.grad().allclose(&(once * 2.0), 1e-5, 1e-3, false));
        // Another use of the weight is libtorch's, and autograd adds its gradient.
        let (mixed, plain, few) = (of(), of(), values(&[2, 48], 0.7));
        let linear = |x: &Tensor, w: &Tensor| x.linear(w, None::<&Tensor>).square().sum(Kind::Float);
        let ours = projection_here(&x, &mixed).unwrap().square().sum(Kind::Float);
        (linear(&few, &mixed) + ours).backward();
        (linear(&few, &plain) + linear(&x, &plain)).backward();
        assert!(mixed.grad().allclose(&plain.grad(), 1e-4, 1e-2, false));
        // No gradient required; another last dimension; two dtypes.
        let (x, w) = (values(&[200, 48], 0.0), values(&[70, 48], 1.0));
        let learned = w.copy().set_requires_grad(true);
        assert!(projection_here(&x, &w).is_none());
        assert!(projection_here(&values(&[200, 47], 0.0), &learned).is_none());
        assert!(projection_here(&x.to_kind(Kind::Double), &learned).is_none());
    }
}
