//! The gate by libtorch's operators.

use tch::Tensor;

use super::Activation;

/// `act(gate) ⊙ up`, `[N, I]`.
pub(super) fn gated(gate: &Tensor, up: &Tensor, activation: Activation) -> Tensor {
    let gate = match activation {
        Activation::Silu => gate.silu(),
        Activation::GeluTanh => gate.gelu("tanh"),
    };
    gate * up
}
