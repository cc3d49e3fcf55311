//! The selector: which of a slot's likeliest tokens goes with the token before it.

use deepspec_models::nn::{Builder, Init, Linear};
use tch::{Kind, Tensor};

use super::config::DFlash2Config;

/// Scores each slot's k likeliest tokens: `S(a, b) = U(b) + ⟨A[a] ⊙ P h, B[b]⟩` for token b behind token a, with logits U and state h. At
/// first it adds nothing.
pub struct PathSelector {
    predecessors: Tensor, // A, [V, r]
    successors: Tensor,   // B, [V, r]
    projection: Linear,   // P, d -> r
    top_k: i64,
}

/// Candidates of n slots.
pub struct Candidates {
    /// Their ids, `[n, k]`.
    pub tokens: Tensor,
    /// Their rows of B, `[n, k, r]` float32.
    pub successors: Tensor,
    /// Their scores, `[n, k]` float32.
    pub scores: Tensor,
}

impl PathSelector {
    pub fn new(b: &Builder, config: &DFlash2Config) -> Self {
        let (model, rank) = (&config.decoder.model, config.selector_rank);
        let codebook =
            |name: &str, init| b.get(&format!("candidate_selector.{name}"), &[model.vocab_size, rank], init);
        Self {
            predecessors: codebook("predecessor_codebook", Init::Normal),
            successors: codebook("successor_codebook", Init::Zeros),
            projection: Linear::new(b, "candidate_selector.hidden_projection", model.hidden_size, rank),
            top_k: config.selector_top_k,
        }
    }

    /// A and B, `[V, r]` each.
    pub fn codebooks(&self) -> (&Tensor, &Tensor) {
        (&self.predecessors, &self.successors)
    }

    /// `A[token]`, `[.., r]`.
    pub fn embed(&self, previous: &Tensor) -> Tensor {
        Tensor::embedding(&self.predecessors, previous, -1, false, false)
    }

    /// `A[a] ⊙ P h`: states `[.., d]` and embeddings `[.., r]` to `[.., r]`.
    pub fn features(&self, hidden: &Tensor, embeddings: &Tensor) -> Tensor {
        self.projection.forward(hidden) * embeddings
    }

    /// The candidates of float32 logits `[n, V]` with features `[n, r]`.
    pub fn candidates(&self, logits: &Tensor, features: &Tensor) -> Candidates {
        let (unary, tokens) = logits.topk(self.top_k, -1, true, true);
        let shape = [-1, self.top_k, features.size()[1]];
        let successors =
            self.successors.index_select(0, &tokens.flatten(0, 1)).view(shape).to_kind(Kind::Float);
        let pairs = successors.bmm(&features.to_kind(Kind::Float).unsqueeze(2)).squeeze_dim(2);
        Candidates { tokens, successors, scores: unary + pairs }
    }

    /// Float32 logits `[n, V]` that only candidates have: −∞ elsewhere.
    pub fn restrict(&self, logits: &Tensor, features: &Tensor) -> Tensor {
        let Candidates { tokens, scores, .. } = self.candidates(logits, features);
        logits.full_like(f64::NEG_INFINITY).scatter(1, &tokens, &scores)
    }
}
