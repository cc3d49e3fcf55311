//! The MLP operator by operator.

use tch::Tensor;

use super::{Activation, GatedMlp};
use crate::linear::linear;

/// See [`super::gated_mlp`].
pub(super) fn gated_mlp(x: &Tensor, GatedMlp { gate, up, down, activation }: GatedMlp<'_>) -> Tensor {
    let (gate, up) = (linear(x, gate, None), linear(x, up, None));
    let gate = match activation {
        Activation::Silu => gate.silu(),
        Activation::GeluTanh => gate.gelu("tanh"),
    };
    linear(&(gate * up), down, None)
}
