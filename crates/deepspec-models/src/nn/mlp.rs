//! The MLP of a decoder layer: one gated MLP, or experts of which a router chooses some for each row.

use deepspec_ops::{
    Activation, Expert, GatedMlp, MixtureOfExperts, Router, Weight, gated_mlp, in_whole_vectors,
    mixture_of_experts,
};
use tch::Tensor;

use super::spec::{ExpertTensors, ExpertsSpec, LayerSpec};
use super::{Builder, Init, Linear};

/// The MLP of a layer.
pub(super) enum Mlp {
    /// `down(act(gate(x)) ⊙ up(x))`.
    Dense(DenseMlp),
    /// The weighted sum of such MLPs, and of a shared one if there is one.
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
    bias: Option<Tensor>,
    experts: Vec<Expert>,
    shared: Option<SharedExpert>,
    spec: ExpertsSpec,
    activation: Activation,
}

/// An expert that all rows have, weighted by the sigmoid of a gate.
struct SharedExpert {
    mlp: DenseMlp,
    gate: Linear,
}

impl Mlp {
    pub fn new(b: &Builder, name: &str, spec: &LayerSpec) -> Self {
        match spec.experts {
            Some(experts) => Self::Experts(ExpertMlps::new(b, name, spec, experts)),
            None => Self::Dense(DenseMlp::new(
                b,
                name,
                [spec.hidden_size, spec.intermediate_size],
                spec.activation,
            )),
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
    fn new(b: &Builder, name: &str, [d, inner]: [i64; 2], activation: Activation) -> Self {
        Self {
            gate_proj: Linear::new(b, &format!("{name}.gate_proj"), d, inner),
            up_proj: Linear::new(b, &format!("{name}.up_proj"), d, inner),
            down_proj: Linear::new(b, &format!("{name}.down_proj"), inner, d),
            activation,
        }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let Self { gate_proj, up_proj, down_proj, activation } = self;
        let (gate, up, down) = (gate_proj.weight(), up_proj.weight(), down_proj.weight());
        gated_mlp(x, GatedMlp { gate, up, down, activation: *activation, biases: None })
    }
}

impl ExpertMlps {
    fn new(b: &Builder, name: &str, layer: &LayerSpec, spec: ExpertsSpec) -> Self {
        let (d, activation) = (layer.hidden_size, layer.activation);
        let shared = spec.shared_width.map(|width| SharedExpert {
            mlp: DenseMlp::new(b, &format!("{name}.shared_expert"), [d, width], activation),
            gate: Linear::new(b, &format!("{name}.shared_expert_gate"), d, 1),
        });
        let router = |module: &str| {
            b.linear_weight(&format!("{name}.{module}.weight"), &[spec.count, d], Init::Normal)
        };
        match spec.tensors {
            ExpertTensors::EachOrStacked => Self {
                router: router("gate"),
                bias: None,
                experts: each_or_stacked(b, &format!("{name}.experts"), d, spec),
                shared,
                spec,
                activation,
            },
            ExpertTensors::Interleaved => Self {
                router: router("router"),
                bias: Some(b.get(&format!("{name}.router.bias"), &[spec.count], Init::Zeros)),
                experts: interleaved(b, &format!("{name}.experts"), d, spec),
                shared,
                spec,
                activation,
            },
        }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let Self { router, bias, experts, shared, spec, activation } = self;
        let router = Router { weight: router, bias: bias.as_ref(), active: spec.active, scores: spec.scores };
        let chosen = mixture_of_experts(x, MixtureOfExperts { router, experts, activation: *activation });
        match shared {
            Some(SharedExpert { mlp, gate }) => {
                chosen + in_whole_vectors(&gate.forward(x), Tensor::sigmoid) * mlp.forward(x)
            }
            None => chosen,
        }
    }
}

/// Experts of [`ExpertTensors::EachOrStacked`].
fn each_or_stacked(b: &Builder, name: &str, d: i64, spec: ExpertsSpec) -> Vec<Expert> {
    let ExpertsSpec { count, width, .. } = spec;
    let gate_up = b.whole_if_present(&format!("{name}.gate_up_proj"), &[count, 2 * width, d]);
    let down = b.whole_if_present(&format!("{name}.down_proj"), &[count, d, width]);
    let weight = |expert: i64, part: &str, shape: [i64; 2], all: &Option<Tensor>, first: i64| {
        let name = format!("{name}.{expert}.{part}.weight");
        match all {
            Some(all) => b.given_weight(&name, all.select(0, expert).narrow(0, first, shape[0])),
            None => b.linear_weight(&name, &shape, Init::Normal),
        }
    };
    let expert = |e| Expert {
        gate: weight(e, "gate_proj", [width, d], &gate_up, 0),
        up: weight(e, "up_proj", [width, d], &gate_up, width),
        down: weight(e, "down_proj", [d, width], &down, 0),
        biases: None,
    };
    (0..count).map(expert).collect()
}

/// Experts of [`ExpertTensors::Interleaved`].
fn interleaved(b: &Builder, name: &str, d: i64, spec: ExpertsSpec) -> Vec<Expert> {
    let ExpertsSpec { count, width, .. } = spec;
    let whole = |part: &str, shape: &[i64]| b.whole(&format!("{name}.{part}"), shape);
    let gate_up = whole("gate_up_proj", &[count, d, 2 * width]);
    let gate_up_bias = whole("gate_up_proj_bias", &[count, 2 * width]);
    let down = whole("down_proj", &[count, width, d]);
    let down_bias = whole("down_proj_bias", &[count, d]);
    // Every `step`-th output from `first` is the part's.
    let weight = |e: i64, part: &str, shape: [i64; 2], all: &Option<Tensor>, (first, step): (i64, i64)| {
        let name = format!("{name}.{e}.{part}.weight");
        match all {
            Some(all) => {
                b.given_weight(&name, all.select(0, e).slice(1, first, None, step).tr().contiguous())
            }
            None => b.linear_weight(&name, &shape, Init::Normal),
        }
    };
    let bias = |e: i64, part: &str, outputs: i64, all: &Option<Tensor>, (first, step): (i64, i64)| {
        let name = format!("{name}.{e}.{part}.bias");
        match all {
            Some(all) => b.given(&name, all.select(0, e).slice(0, first, None, step).contiguous()),
            None => b.get(&name, &[outputs], Init::Zeros),
        }
    };
    let (gates, ups, all) = ((0, 2), (1, 2), (0, 1));
    let expert = |e| Expert {
        gate: weight(e, "gate_proj", [width, d], &gate_up, gates),
        up: weight(e, "up_proj", [width, d], &gate_up, ups),
        down: weight(e, "down_proj", [d, width], &down, all),
        biases: Some([
            bias(e, "gate_proj", width, &gate_up_bias, gates),
            bias(e, "up_proj", width, &gate_up_bias, ups),
            bias(e, "down_proj", d, &down_bias, all),
        ]),
    };
    (0..count).map(expert).collect()
}
