//! The gated MLP of decoder layers, and of experts.

mod reference;

use tch::Tensor;

use crate::ffi;
use crate::linear::{Weight, linear};
use reference::SWIGLU_ALPHA;

/// Activation function of the MLP's gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// GELU in its tanh approximation.
    GeluTanh,
    /// `g · sigmoid(1.702·g)` with `g = min(x, 7)`. It multiplies `u + 1`, where u is the up projection within ±7 (gpt-oss).
    ClampedSwiglu,
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
    /// Biases of gate `[I]`, up `[I]` and down `[d]`; None if there are none.
    pub biases: Option<&'a [Tensor; 3]>,
}

/// `down(act(gate(x)) ⊙ up(x))` of `x [N, d]`: `[N, d]`.
///
/// With SiLU and without biases, kernels run on the CPU. Packed weights need two kernel calls. In training, one kernel computes
/// gating and down projection, and saves only `gate(x)` and `up(x)` for the backward pass.
pub fn gated_mlp(x: &Tensor, weights: GatedMlp<'_>) -> Tensor {
    let GatedMlp { gate, up, down, activation, biases } = weights;
    if let Some([of_gate, of_up, of_down]) = biases {
        let (gate, up) = (linear(x, gate, Some(of_gate)), linear(x, up, Some(of_up)));
        return linear(&gated(&gate, &up, activation), down, Some(of_down));
    }
    if let (Activation::Silu, Weight::Packed(gate), Weight::Packed(up)) = (activation, gate, up) {
        return linear(&ffi::packed_gated_product(x, None, gate, up), down, None);
    }
    let (gate, up) = (linear(x, gate, None), linear(x, up, None));
    if let (Activation::Silu, Weight::Stored(down)) = (activation, down)
        && let Some(y) = ffi::gated_product(&gate, &up, down)
    {
        return y;
    }
    linear(&gated(&gate, &up, activation), down, None)
}

/// `act(gate) ⊙ up`, `[N, I]`. With a kernel, the bits of a row do not depend on other rows.
fn gated(gate: &Tensor, up: &Tensor, activation: Activation) -> Tensor {
    let by_kernel = match activation {
        Activation::Silu => ffi::silu_times(gate, up),
        Activation::GeluTanh => None,
        Activation::ClampedSwiglu => {
            let (gate, up) = reference::clamped(gate, up);
            // g·sigmoid(α·g) is silu(α·g) / α.
            ffi::silu_times(&(gate * SWIGLU_ALPHA), &(up / SWIGLU_ALPHA))
        }
    };
    by_kernel.unwrap_or_else(|| reference::gated(gate, up, activation))
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
        let all = [values([1, inner], 5), values([1, inner], 6), values([1, d], 7)].map(|row| row.squeeze());
        let activations = [Activation::Silu, Activation::GeluTanh, Activation::ClampedSwiglu];
        for (activation, biases) in activations.into_iter().flat_map(|own| [(own, None), (own, Some(&all))]) {
            let bias = |part: usize| biases.map(|all| &all[part]);
            let gated = reference::gated(&x.linear(&gate, bias(0)), &x.linear(&up, bias(1)), activation);
            let expected = gated.linear(&down, bias(2));
            for form in [
                |tensor: &Tensor| Weight::Stored(tensor.shallow_clone()),
                |tensor: &Tensor| Weight::Stored(tensor.shallow_clone()).pack(),
            ] {
                let [gate, up, down] = [&gate, &up, &down].map(form);
                let weights = GatedMlp { gate: &gate, up: &up, down: &down, activation, biases };
                let found = gated_mlp(&x, weights);
                let error = (found - &expected).abs().max().double_value(&[]);
                let largest = expected.abs().max().double_value(&[]);
                assert!(error < 1e-5 * largest, "{activation:?}: {error:e} of {largest:e}");
            }
        }
    }
    /// Gates above 7, and up projections outside ±7, count as the limits.
    #[test]
    fn clamped_gates_have_limits() {
        let gate = Tensor::from_slice(&[-20.0f32, 1.0, 7.0, 30.0]);
        let up = Tensor::from_slice(&[0.5f32, -9.0, 9.0, 7.0]);
        let of = |g: f64, u: f64| ((u + 1.0) * g / (1.0 + (-1.702 * g).exp())) as f32;
        let expected = Tensor::from_slice(&[of(-20.0, 0.5), of(1.0, -7.0), of(7.0, 7.0), of(7.0, 7.0)]);
        let found = reference::gated(&gate, &up, Activation::ClampedSwiglu);
        assert!(found.allclose(&expected, 1e-6, 1e-12, false), "{found}");
    }
}
