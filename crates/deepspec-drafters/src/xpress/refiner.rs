//! The causal refiner: a low-rank bias on the logits of a block's slots, given a guess of the token before each slot.

use deepspec_models::nn::{Builder, Init, Linear, Weight};
use deepspec_ops::{Activation, GatedMlp, gated_mlp, linear};
use tch::{Device, Kind, Tensor};

use super::model::XPressConfig;

/// Head of xPress (section 3 of arXiv 2608.02438), over all B slots of N blocks.
///
/// With hidden states h of a block, their mean h̄ over all slots, and the token p_k before slot k:
///
/// ```text
/// x_k = in_proj [down_h h_k; down_g h̄; w1[p_k]]
/// y_k = x_k + Σ_{j ≤ k} L[:, k, j] ⊙ x_j
/// f_k = y_k + down_proj (silu(gate_proj y_k) ⊙ up_proj y_k),    bias_k = w2 f_k
/// ```
pub struct RefinerHead {
    w1: Tensor, // [V, r]
    w2: Weight, // [V, r]
    down_h: Linear,
    down_g: Linear,
    in_proj: Linear,
    mix: Tensor, // L, [r, B, B]; only the lower triangle is read
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl RefinerHead {
    /// Requests the head's parameters from the builder. The slots are not mixed at first.
    pub fn new(b: &Builder, config: &XPressConfig) -> Self {
        let (model, settings) = (config.model(), &config.settings);
        let (vocab, width, rank) = (model.vocab_size, model.hidden_size, settings.rank);
        let (size, inner) = (settings.blocks.block_size as i64, rank * settings.mlp_ratio);
        let linear =
            |name: &str, input, output| Linear::new(b, &format!("xpress_head.{name}"), input, output);
        Self {
            w1: b.get("xpress_head.w1.weight", &[vocab, rank], Init::Normal),
            w2: b.linear_weight("xpress_head.w2.weight", &[vocab, rank], Init::Normal),
            down_h: linear("down_h", width, rank),
            down_g: linear("down_g", width, rank),
            in_proj: linear("in_proj", 3 * rank, rank),
            mix: b.get("xpress_head.mix.L", &[rank, size, size], Init::Zeros),
            gate_proj: linear("mlp.gate_proj", rank, inner),
            up_proj: linear("mlp.up_proj", rank, inner),
            down_proj: linear("mlp.down_proj", inner, rank),
        }
    }

    /// Embedding matrix of the previous tokens, `[V, r]`.
    pub fn w1(&self) -> &Tensor {
        &self.w1
    }

    /// Projection of features to the logit bias, `[V, r]`.
    pub fn w2(&self) -> &Weight {
        &self.w2
    }

    /// Embeddings `w1[p]` of previous tokens, `[..]` to `[.., r]`.
    pub fn embed(&self, previous: &Tensor) -> Tensor {
        Tensor::embedding(&self.w1, previous, -1, false, false)
    }

    /// The part of the input that all passes share, `[down_h h; down_g h̄]`: hidden states `[N, B, d]` to `[N, B, 2r]`.
    pub fn state_inputs(&self, hidden: &Tensor) -> Tensor {
        let own = self.down_h.forward(hidden);
        let mean = hidden.mean_dim(1, true, None::<Kind>); // [N, 1, d]
        let of_block = self.down_g.forward(&mean).expand(own.size(), false);
        Tensor::cat(&[own, of_block], -1)
    }

    /// Features f of all slots, `[N, B, r]`, from [`state_inputs`](Self::state_inputs) and the embeddings `[N, B, r]` of the tokens before
    /// the slots.
    pub fn features(&self, state_inputs: &Tensor, embeddings: &Tensor) -> Tensor {
        let x = self.in_proj.forward(&Tensor::cat(&[state_inputs, embeddings], -1));
        let y = &x + self.mix_slots(&x);
        let mlp = GatedMlp {
            gate: self.gate_proj.weight(),
            up: self.up_proj.weight(),
            down: self.down_proj.weight(),
            activation: Activation::Silu,
            biases: None,
        };
        &y + gated_mlp(&y.flatten(0, 1), mlp).view_as(&y)
    }

    /// `Σ_{j ≤ k} L[:, k, j] ⊙ x_j` of all slots k, `[N, B, r]` of `[N, B, r]`.
    fn mix_slots(&self, x: &Tensor) -> Tensor {
        if x.device() != Device::Cpu {
            return self.mix.tril(0).bmm(&x.permute([2, 1, 0])).permute([2, 1, 0]);
        }
        // Element by element, since the bits of a matrix product of libtorch depend on the number of blocks.
        let mixed_slot = |k: i64| {
            let weights = self.mix.select(1, k).narrow(1, 0, k + 1).tr(); // [k + 1, r]
            (x.narrow(1, 0, k + 1) * weights).sum_dim_intlist(1, false, None::<Kind>)
        };
        Tensor::stack(&(0..x.size()[1]).map(mixed_slot).collect::<Vec<_>>(), 1)
    }

    /// Float32 bias `w2 f` on the logits, `[.., r]` to `[.., V]`.
    pub fn logit_bias(&self, features: &Tensor) -> Tensor {
        linear(features, &self.w2, None).to_kind(Kind::Float)
    }
}
