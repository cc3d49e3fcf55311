//! Gated recurrent unit.

use deepspec_ops::{Weight, linear};
use tch::Tensor;

use super::{Builder, Init};

/// A layer of gated recurrent units without biases. Tensor names and the gate order r, z, n are those of `torch.nn.GRU`.
///
/// `s' = (1 − z)∘n + z∘s` with `r = σ(W_ir x + W_hr s)`, `z = σ(W_iz x + W_hz s)` and `n = tanh(W_in x + r∘(W_hn s))`. The first state
/// is zero. Every step is the same few products for any number of rows, so that a row does not depend on its batch.
pub struct Gru {
    input: Weight,     // [3·H, d]
    recurrent: Weight, // [3·H, H]
    size: i64,
}

impl Gru {
    /// A layer from `[.., input]` to states `[.., size]`.
    pub fn new(b: &Builder, name: &str, input: i64, size: i64) -> Self {
        let weight = |part: &str, from: i64| {
            b.linear_weight(&format!("{name}.weight_{part}_l0"), &[3 * size, from], Init::Normal)
        };
        Self { input: weight("ih", input), recurrent: weight("hh", size), size }
    }

    /// State `[S, H]` after the inputs `x [S, d]`; `state` is the one before, None at the first step.
    pub fn step(&self, x: &Tensor, state: Option<&Tensor>) -> Tensor {
        self.update(&linear(x, &self.input, None), state)
    }

    /// States `[S, T, H]` after each of T inputs `x [S, T, d]`, from the first step on.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let gates = linear(x, &self.input, None); // [S, T, 3·H]
        let mut states: Vec<Tensor> = vec![];
        for step in 0..x.size()[1] {
            states.push(self.update(&gates.select(1, step), states.last()));
        }
        Tensor::stack(&states, 1)
    }

    /// The next state, from the products of the input weight `[S, 3·H]`.
    fn update(&self, gates: &Tensor, state: Option<&Tensor>) -> Tensor {
        let part = |all: &Tensor, at: i64| all.narrow(-1, at * self.size, self.size);
        let [reset, keep, new] = [0, 1, 2].map(|at| part(gates, at));
        let Some(state) = state else {
            return (1.0 - keep.sigmoid()) * new.tanh();
        };
        let recurrent = linear(state, &self.recurrent, None);
        let reset = (reset + part(&recurrent, 0)).sigmoid();
        let keep = (keep + part(&recurrent, 1)).sigmoid();
        let new = (new + reset * part(&recurrent, 2)).tanh();
        (1.0 - &keep) * new + keep * state
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    /// States and gradients are those of libtorch's own layer.
    #[test]
    fn it_computes_what_libtorch_computes() {
        let (input, size, steps) = (5, 3, 4);
        let b = Builder::random_init(1, 0.7, Device::Cpu, Kind::Float);
        let gru = Gru::new(&b, "gru", input, size);
        let parameters = b.take_state_dict().parameters;
        let names: Vec<&str> = parameters.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["gru.weight_ih_l0", "gru.weight_hh_l0"]);
        let weights: Vec<Tensor> =
            parameters.iter().map(|(_, weight)| weight.set_requires_grad(true)).collect();
        let x = (Tensor::arange(2 * steps * input, (Kind::Float, Device::Cpu)) * 1.7).sin();
        let x = x.view([2, steps, input]);
        let first = Tensor::zeros([1, 2, size], (Kind::Float, Device::Cpu));
        let (expected, _) = x.gru(&first, &weights, false, 1, 0.0, true, false, true);
        let found = gru.forward(&x);
        assert!(found.allclose(&expected, 1e-5, 1e-6, false), "{found} {expected}");
        let gradients = [&found, &expected].map(|states| {
            weights.iter().for_each(|weight| weight.shallow_clone().zero_grad());
            (states * states).sum(Kind::Float).backward();
            weights.iter().map(|weight| weight.grad().copy()).collect::<Vec<_>>()
        });
        for (found, expected) in gradients[0].iter().zip(&gradients[1]) {
            assert!(found.allclose(expected, 1e-5, 1e-6, false), "{found} {expected}");
            assert!(expected.abs().max().double_value(&[]) > 1e-2);
        }
        // One step after the other, too.
        let mut state: Option<Tensor> = None;
        for step in 0..steps {
            let next = gru.step(&x.select(1, step), state.as_ref());
            assert!(next.allclose(&expected.select(1, step), 1e-5, 1e-6, false));
            state = Some(next);
        }
    }
}
