//! The layer by libtorch's operator.

use tch::Tensor;

/// See [`super::linear`].
pub(super) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    x.linear(weight, bias)
}
