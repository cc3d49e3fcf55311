//! The gate by libtorch's operators.

use tch::Tensor;

use super::Activation;

/// Largest gate, and largest magnitude of the up projection, of [`Activation::ClampedSwiglu`].
const SWIGLU_LIMIT: f64 = 7.0;
/// Factor of the gate in the sigmoid of [`Activation::ClampedSwiglu`].
const SWIGLU_ALPHA: f64 = 1.702;

/// `act(gate) ⊙ up`, `[N, I]`.
pub(super) fn gated(gate: &Tensor, up: &Tensor, activation: Activation) -> Tensor {
    match activation {
        Activation::Silu => gate.silu() * up,
        Activation::GeluTanh => gate.gelu("tanh") * up,
        Activation::ClampedSwiglu => {
            let gate = gate.clamp_max(SWIGLU_LIMIT);
            let up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT);
            (up + 1.0) * (&gate * (&gate * SWIGLU_ALPHA).sigmoid())
        }
    }
}
