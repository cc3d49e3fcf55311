//! The gated MLP of Llama, Qwen3 and Gemma.

mod reference;

use tch::Tensor;

use crate::ffi;
use crate::linear::{Weight, linear};

/// Activation function of the MLP's gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// GELU in its tanh approximation.
    GeluTanh,
}

/// Weights of a gated MLP: `gate` and `up` are `[I, d]`, `down` is `[d, I]`.
#[derive(Clone, Copy)]
pub struct GatedMlp<'a> {
    /// Gate projection `[I, d]`.
    pub gate: &'a Weight,
    /// Up projection `[I, d]`.
    pub up: &'a Weight,
    /// Down projection `[d, I]`.
    pub down: &'a Weight,
    /// Activation function of the gate.
    pub activation: Activation,
}

/// `down(act(gate(x)) ⊙ up(x))` of `x [N, d]`: `[N, d]`.
///
/// With SiLU, kernels run on the CPU. Packed weights need two kernel calls. In training, one kernel computes
/// gating and down projection, and saves only `gate(x)` and `up(x)` for the backward pass.
pub fn gated_mlp(x: &Tensor, weights: GatedMlp<'_>) -> Tensor {
    let GatedMlp { gate, up, down, activation } = weights;
    if let (Activation::Silu, Weight::Packed(gate), Weight::Packed(up)) = (activation, gate, up) {
        return linear(&ffi::packed_gated_product(x, None, gate, up), down, None);
    }
    let (gate, up) = (linear(x, gate, None), linear(x, up, None));
    if let (Activation::Silu, Weight::Stored(down)) = (activation, down)
        && let Some(y) = ffi::gated_product(&gate, &up, down)
    {
        return y;
    }
    let gated = if activation == Activation::Silu { ffi::silu_times(&gate, &up) } else { None };
    linear(&gated.unwrap_or_else(|| reference::gated(&gate, &up, activation)), down, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_compute_what_the_reference_computes() {
        let values = |shape: [i64; 2], seed: u64| {
            Tensor::from_slice(&deepspec_testkit::noise(seed, (shape[0] * shape[1]) as usize)).view(shape)
        };
        let (d, inner) = (64, 96);
        let x = values([5, d], 1);
        let [gate, up, down] = [values([inner, d], 2), values([inner, d], 3), values([d, inner], 4)];
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let gated = reference::gated(
                &x.linear(&gate, None::<&Tensor>),
                &x.linear(&up, None::<&Tensor>),
                activation,
            );
            let expected = gated.linear(&down, None::<&Tensor>);
            for form in [
                |tensor: &Tensor| Weight::Stored(tensor.shallow_clone()),
                |tensor: &Tensor| Weight::Stored(tensor.shallow_clone()).pack(),
            ] {
                let [gate, up, down] = [&gate, &up, &down].map(form);
                let found = gated_mlp(&x, GatedMlp { gate: &gate, up: &up, down: &down, activation });
                let error = (found - &expected).abs().max().double_value(&[]);
                let largest = expected.abs().max().double_value(&[]);
                assert!(error < 1e-5 * largest, "{activation:?}: {error:e} of {largest:e}");
            }
        }
    }
}
