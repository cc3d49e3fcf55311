//! The norm by libtorch's operator.

use tch::Tensor;

use super::RmsNormParams;

/// See [`super::rms_norm`].
pub(super) fn rms_norm(x: &Tensor, RmsNormParams { weights, eps }: RmsNormParams<'_>) -> Tensor {
    x.rms_norm(weights.size(), Some(weights), eps)
}
