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
