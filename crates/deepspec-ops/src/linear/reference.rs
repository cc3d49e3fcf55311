//! The linear layer, computed with libtorch's operator.

use tch::{Kind, Tensor};

/// See [`super::linear`].
pub(super) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    x.linear(weight, bias)
}

/// See [`super::matmul_into`].
pub(super) fn matmul_into(a: &Tensor, b: &Tensor, out: &mut Tensor, add: bool) {
    let _ = match add {
        true if a.kind() == out.kind() && a.kind() == Kind::Float => out.addmm_(a, b),
        true => out.g_add_(&a.mm(b)),
        false => a.mm_out(out, b),
    };
}
