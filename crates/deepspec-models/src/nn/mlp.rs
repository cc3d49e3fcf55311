//! The MLP of a decoder layer: one gated MLP, or experts of which a router chooses some for each row.

use deepspec_ops::{
    Activation, Expert, GatedMlp, MixtureOfExperts, Router, Weight, gated_mlp, mixture_of_experts,
};
use tch::Tensor;

use super::spec::{ExpertsSpec, LayerSpec};
use super::{Builder, Init, Linear};

/// The MLP of a layer.
pub(super) enum Mlp {
    /// `down(act(gate(x)) ⊙ up(x))`.
    Dense(DenseMlp),
    /// The weighted sum of such MLPs.
    Experts(ExpertMlps),
}

/// A gated MLP.
pub(super) struct DenseMlp {
    pub gate_proj: Linear,
    pub up_proj: Linear,
    pub down_proj: Linear,
    pub activation: Activation,
}

/// A router and its experts.
pub(super) struct ExpertMlps {
    router: Weight,
    experts: Vec<Expert>,
    spec: ExpertsSpec,
    activation: Activation,
}

impl Mlp {
    pub fn new(b: &Builder, name: &str, spec: &LayerSpec) -> Self {
        match spec.experts {
            Some(experts) => Self::Experts(ExpertMlps::new(b, name, spec, experts)),
            None => Self::Dense(DenseMlp::new(b, name, spec)),
        }
    }

    /// `x [N, d]` to `[N, d]`.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        match self {
            Self::Dense(mlp) => mlp.forward(x),
            Self::Experts(experts) => experts.forward(x),
        }
    }
}

impl DenseMlp {
    fn new(b: &Builder, name: &str, spec: &LayerSpec) -> Self {
        let (d, inner) = (spec.hidden_size, spec.intermediate_size);
        Self {
            gate_proj: Linear::new(b, &format!("{name}.gate_proj"), d, inner),
            up_proj: Linear::new(b, &format!("{name}.up_proj"), d, inner),
            down_proj: Linear::new(b, &format!("{name}.down_proj"), inner, d),
            activation: spec.activation,
        }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let Self { gate_proj, up_proj, down_proj, activation } = self;
        let (gate, up, down) = (gate_proj.weight(), up_proj.weight(), down_proj.weight());
        gated_mlp(x, GatedMlp { gate, up, down, activation: *activation })
    }
}

impl ExpertMlps {
    /// Checkpoints have three tensors per expert (`experts.3.gate_proj.weight`), or two that hold all experts:
    /// `experts.gate_up_proj [E, 2·I, d]` and `experts.down_proj [E, d, I]`.
    fn new(b: &Builder, name: &str, layer: &LayerSpec, spec: ExpertsSpec) -> Self {
        let (d, ExpertsSpec { count, width, .. }) = (layer.hidden_size, spec);
        let router = b.linear_weight(&format!("{name}.gate.weight"), &[count, d], Init::Normal);
        let stacked = |part: &str, shape: [i64; 3]| b.stored(&format!("{name}.experts.{part}"), &shape);
        let gate_up = stacked("gate_up_proj", [count, 2 * width, d]);
        let down = stacked("down_proj", [count, d, width]);
        let weight = |expert: i64, part: &str, shape: [i64; 2], all: &Option<Tensor>, first: i64| {
            let name = format!("{name}.experts.{expert}.{part}.weight");
            match all {
                Some(all) => b.given_weight(&name, all.select(0, expert).narrow(0, first, shape[0])),
                None => b.linear_weight(&name, &shape, Init::Normal),
            }
        };
        let expert = |e| Expert {
            gate: weight(e, "gate_proj", [width, d], &gate_up, 0),
            up: weight(e, "up_proj", [width, d], &gate_up, width),
            down: weight(e, "down_proj", [d, width], &down, 0),
        };
        Self { router, experts: (0..count).map(expert).collect(), spec, activation: layer.activation }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let Self { router, experts, spec, activation } = self;
        let router = Router { weight: router, active: spec.active, scores: spec.scores };
        mixture_of_experts(x, MixtureOfExperts { router, experts, activation: *activation })
    }
}
