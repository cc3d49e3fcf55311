//! The gate by libtorch's operators.

use tch::Tensor;

use super::Activation;

/// Largest gate, and largest magnitude of the up projection, of [`Activation::ClampedSwiglu`].
const SWIGLU_LIMIT: f64 = 7.0;
/// Factor of the gate in the sigmoid of [`Activation::ClampedSwiglu`].
pub(super) const SWIGLU_ALPHA: f64 = 1.702;

/// `act(gate) ⊙ up`, `[N, I]`.
pub(super) fn gated(gate: &Tensor, up: &Tensor, activation: Activation) -> Tensor {
    match activation {
        Activation::Silu => gate.silu() * up,
        Activation::GeluTanh => gate.gelu("tanh") * up,
        Activation::ClampedSwiglu => {
            let (gate, up) = clamped(gate, up);
            up * (&gate * (&gate * SWIGLU_ALPHA).sigmoid())
        }
    }
}

/// The gate and the factor of its activation, `u + 1`, of [`Activation::ClampedSwiglu`].
pub(super) fn clamped(gate: &Tensor, up: &Tensor) -> (Tensor, Tensor) {
    (gate.clamp_max(SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1.0)
}
