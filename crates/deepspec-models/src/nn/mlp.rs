//! The gated MLP of a decoder layer.

use deepspec_ops::{Activation, GatedMlp, gated_mlp};
use tch::Tensor;

use super::spec::LayerSpec;
use super::{Builder, Linear};

/// The gated MLP `down(act(gate(x)) ⊙ up(x))`.
pub(super) struct Mlp {
    pub gate_proj: Linear,
    pub up_proj: Linear,
    pub down_proj: Linear,
    pub activation: Activation,
}

impl Mlp {
    pub fn new(b: &Builder, name: &str, spec: &LayerSpec) -> Self {
        let (d, inner) = (spec.hidden_size, spec.intermediate_size);
        Self {
            gate_proj: Linear::new(b, &format!("{name}.gate_proj"), d, inner),
            up_proj: Linear::new(b, &format!("{name}.up_proj"), d, inner),
            down_proj: Linear::new(b, &format!("{name}.down_proj"), inner, d),
            activation: spec.activation,
        }
    }

    /// `x [N, d]` to `[N, d]`.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let Self { gate_proj, up_proj, down_proj, activation } = self;
        let (gate, up, down) = (gate_proj.weight(), up_proj.weight(), down_proj.weight());
        gated_mlp(x, GatedMlp { gate, up, down, activation: *activation })
    }
}
