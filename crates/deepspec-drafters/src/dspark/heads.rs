//! The sequential heads: Markov bias and confidence.

use deepspec_models::nn::{Builder, Init, Linear, Weight};
use deepspec_ops::linear;
use tch::Tensor;

use super::config::BlockConfig;
use super::recipe::{Markov, MarkovKind};

/// Low-rank bias on the logits, given the previous token.
pub struct MarkovHead {
    w1: Tensor, // [V, r]
    w2: Weight, // [V, r]
    form: Form,
    rank: i64,
}

enum Form {
    Vanilla,
    Gated(Linear),
    Rnn(Linear),
}

/// The recurrent state `[S, r]`; stays empty for heads without one.
#[derive(Default)]
pub struct MarkovState(Option<Tensor>);

impl MarkovHead {
    pub fn new(b: &Builder, markov: Markov, vocab: i64, hidden: i64) -> Self {
        let rank = markov.rank;
        Self {
            w1: b.get("markov_head.markov_w1.weight", &[vocab, rank], Init::Normal),
            w2: b.product("markov_head.markov_w2.weight", &[vocab, rank], Init::Normal),
            form: match markov.kind {
                MarkovKind::Vanilla => Form::Vanilla,
                MarkovKind::Gated => {
                    Form::Gated(Linear::with_bias(b, "markov_head.gate_proj", hidden + rank, rank))
                }
                MarkovKind::Rnn => {
                    Form::Rnn(Linear::with_bias(b, "markov_head.joint_proj", 2 * rank + hidden, 3 * rank))
                }
            },
            rank,
        }
    }

    /// The embedding of previous tokens, `[V, r]`.
    pub fn w1(&self) -> &Tensor {
        &self.w1
    }

    /// What turns features into the bias, `[V, r]`.
    pub fn w2(&self) -> &Weight {
        &self.w2
    }

    /// Whether its features are the previous token's embedding, whatever the states.
    pub fn reads_previous_alone(&self) -> bool {
        matches!(self.form, Form::Vanilla)
    }

    /// `e = W1[token]`, `[.., r]`.
    pub fn embed(&self, tokens: &Tensor) -> Tensor {
        Tensor::embedding(&self.w1, tokens, -1, false, false)
    }

    /// What W2 turns into the bias, for one position: `hidden [S, d]`, `e [S, r]` to `[S, r]`.
    pub fn step(&self, hidden: &Tensor, e: &Tensor, state: &mut MarkovState) -> Tensor {
        match &self.form {
            Form::Vanilla => e.shallow_clone(),
            Form::Gated(gate) => gate.forward(&Tensor::cat(&[hidden, e], -1)).sigmoid() * e,
            Form::Rnn(joint) => {
                let s = state.0.take().unwrap_or_else(|| e.zeros_like());
                let parts = joint.forward(&Tensor::cat(&[&s, e, hidden], -1)).split(self.rank, -1);
                let keep = parts[0].sigmoid();
                let s = &keep * s + (1.0 - &keep) * parts[1].tanh();
                state.0 = Some(s);
                parts[2].tanh()
            }
        }
    }

    /// Teacher-forced [`MarkovHead::step`]s over whole blocks: `hidden [A, γ, d]`, `e [A, γ, r]` to `[A, γ, r]`.
    pub fn features(&self, hidden: &Tensor, e: &Tensor) -> Tensor {
        match &self.form {
            Form::Vanilla | Form::Gated(_) => self.step(hidden, e, &mut MarkovState::default()),
            Form::Rnn(_) => {
                let mut state = MarkovState::default();
                let steps: Vec<Tensor> = (0..e.size()[1])
                    .map(|k| self.step(&hidden.select(1, k), &e.select(1, k), &mut state))
                    .collect();
                Tensor::stack(&steps, 1)
            }
        }
    }

    /// `W2 · features`, `[.., r]` to `[.., V]`.
    pub fn bias(&self, features: &Tensor) -> Tensor {
        linear(features, &self.w2, None)
    }
}

/// Logit of the probability that the target accepts a drafted token, given that it accepted those before.
pub struct ConfidenceHead {
    proj: Linear,
    with_markov: bool,
}

impl ConfidenceHead {
    pub fn new(b: &Builder, config: &BlockConfig) -> Option<Self> {
        let confidence = config.confidence?;
        let rank = if confidence.with_markov { config.markov.map_or(0, |markov| markov.rank) } else { 0 };
        let proj = Linear::with_bias(b, "confidence_head.proj", config.decoder.model.hidden_size + rank, 1);
        Some(Self { proj, with_markov: confidence.with_markov })
    }

    /// `hidden [.., d]` and the previous token's `e [.., r]` to logits `[..]`.
    pub fn forward(&self, hidden: &Tensor, e: Option<&Tensor>) -> Tensor {
        let logit = match e {
            Some(e) if self.with_markov => self.proj.forward(&Tensor::cat(&[hidden, e], -1)),
            _ => self.proj.forward(hidden),
        };
        logit.squeeze_dim(-1)
    }
}
