//! The gated MLP of Llama, Qwen3 and Gemma.

mod reference;

use tch::Tensor;

use crate::ffi;
use crate::linear::{Weight, linear};

/// The function on the MLP's gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// The Gaussian error unit in its tanh form.
    GeluTanh,
}

/// Weights of a gated MLP: `gate` and `up` are `[I, d]`, `down` is `[d, I]`.
#[derive(Clone, Copy)]
pub struct GatedMlp<'a> {
    /// Its gate projection.
    pub gate: &'a Weight,
    /// Its up projection.
    pub up: &'a Weight,
    /// Its down projection.
    pub down: &'a Weight,
    /// The function on the gate.
    pub activation: Activation,
}

/// `down(act(gate(x)) ⊙ up(x))` of `x [N, d]`: `[N, d]`.
///
/// For SiLU on the CPU, packed weights run in two calls, and in training one kernel computes the product of the gated values
/// and `down`, whose backward keeps `gate(x)` and `up(x)` alone. All other cases run operator by operator.
pub fn gated_mlp(x: &Tensor, weights: GatedMlp<'_>) -> Tensor {
    let GatedMlp { gate, up, down, activation } = weights;
    if activation != Activation::Silu {
        return reference::gated_mlp(x, weights);
    }
    if let (Weight::Packed(gate), Weight::Packed(up)) = (gate, up) {
        return linear(&ffi::packed_gated_product(x, None, gate, up), down, None);
    }
    let (gate, up) = (linear(x, gate, None), linear(x, up, None));
    if let Weight::Stored(down) = down
        && let Some(y) = ffi::gated_product(&gate, &up, down)
    {
        return y;
    }
    linear(&ffi::silu_times(&gate, &up).unwrap_or_else(|| gate.silu() * up), down, None)
}
