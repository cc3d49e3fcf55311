//! The rotation by libtorch's operators.

use tch::Tensor;

/// See [`super::rope`].
pub(super) fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    let half = x.size()[2] / 2;
    let (a, b) = (x.narrow(2, 0, half), x.narrow(2, half, half));
    Tensor::cat(&[&a * cos - &b * sin, b * cos + a * sin], 2)
}
