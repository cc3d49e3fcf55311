//! The mixture of experts of a stage: routed experts and one that every row has.

use deepspec_models::nn::{Builder, Init, Linear, RouterScores, Weight};
use deepspec_ops::{Router, combine_experts};
use tch::Tensor;

use super::settings::StageSettings;

/// A SwiGLU whose gate is at most `limit`, and whose up projection is within ± `limit`.
struct LimitedMlp {
    w1: Linear, // gate, d -> I
    w3: Linear, // up, d -> I
    w2: Linear, // down, I -> d
    limit: f64,
}

impl LimitedMlp {
    fn new(b: &Builder, name: &str, hidden: i64, settings: &StageSettings) -> Self {
        let inner = settings.moe_intermediate_size;
        let projection =
            |part: &str, input: i64, output: i64| Linear::new(b, &format!("{name}.{part}"), input, output);
        Self {
            w1: projection("w1", hidden, inner),
            w3: projection("w3", hidden, inner),
            w2: projection("w2", inner, hidden),
            limit: settings.swiglu_limit,
        }
    }

    /// `w2(silu(min(w1(x), limit)) ⊙ clamp(w3(x), ± limit))`, `[N, d]` to `[N, d]`. A limit of 0 is none.
    fn forward(&self, x: &Tensor) -> Tensor {
        let (gate, up) = (self.w1.forward(x), self.w3.forward(x));
        let (gate, up) = match self.limit > 0.0 {
            true => (gate.clamp_max(self.limit), up.clamp(-self.limit, self.limit)),
            false => (gate, up),
        };
        self.w2.forward(&(gate.silu() * up))
    }
}

/// Router, routed experts and shared expert.
pub struct StageExperts {
    gate: Weight,
    /// Bias of the selection, `[E]`. DeepSeek's training balances the experts by it; it has no gradient, and is not trained here.
    bias: Tensor,
    experts: Vec<LimitedMlp>,
    shared: LimitedMlp,
    active: i64,
    scaling: f64,
}

impl StageExperts {
    /// The tensors below `name`: `gate.weight`, `gate.bias`, `experts.{e}.{w1,w3,w2}`, `shared_experts.{w1,w3,w2}`.
    pub fn new(b: &Builder, name: &str, hidden: i64, settings: &StageSettings) -> Self {
        let count = settings.n_routed_experts;
        let expert = |e: i64| LimitedMlp::new(b, &format!("{name}.experts.{e}"), hidden, settings);
        Self {
            gate: b.linear_weight(&format!("{name}.gate.weight"), &[count, hidden], Init::Normal),
            bias: b.buffer(&format!("{name}.gate.bias"), &[count], Init::Zeros),
            experts: (0..count).map(expert).collect(),
            shared: LimitedMlp::new(b, &format!("{name}.shared_experts"), hidden, settings),
            active: settings.num_experts_per_tok,
            scaling: settings.routed_scaling_factor,
        }
    }

    /// `[N, d]` to `[N, d]`.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let router = Router {
            weight: &self.gate,
            bias: Some(&self.bias),
            active: self.active,
            scores: RouterScores::SqrtSoftplus,
        };
        let run = |expert: usize, rows: &Tensor| self.experts[expert].forward(rows);
        combine_experts(x, router, self.experts.len(), run) * self.scaling + self.shared.forward(x)
    }
}
