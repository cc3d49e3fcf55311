//! Root-mean-square norm (Zhang and Sennrich 2019).

mod reference;

use tch::Tensor;

use crate::ffi;
pub use crate::ffi::RmsNormParams;

/// `x / sqrt(mean(x²) + ε) · w` over the last dimension; sums are float32, and the result has the dtype of `x`.
///
/// A kernel runs on contiguous float32 tensors of the CPU, forward and backward; libtorch's operator runs elsewhere.
pub fn rms_norm(x: &Tensor, norm: RmsNormParams<'_>) -> Tensor {
    ffi::rms_norm(x, norm.weights, norm.eps).unwrap_or_else(|| reference::rms_norm(x, norm))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_compute_what_the_reference_computes() {
        let values = |seed: u64, count: usize| Tensor::from_slice(&deepspec_testkit::noise(seed, count));
        let (x, weights) = (values(1, 5 * 96).view([5, 96]), values(2, 96));
        let norm = RmsNormParams { weights: &weights, eps: 1e-6 };
        assert!(rms_norm(&x, norm).allclose(&reference::rms_norm(&x, norm), 1e-5, 1e-6, false));
    }
}
