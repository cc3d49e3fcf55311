//! Embedding and head of a language model.

use deepspec_ops::distill_loss::LossHead;
use deepspec_ops::linear;
use tch::{Kind, Tensor};

use super::Weight;

/// Embedding and LM head, `[V, d]` each.
pub struct EmbedHead {
    embed_tokens: Tensor,
    lm_head: Weight,
    /// Factor on embeddings, in the dtype of the weights; None for 1.
    scale: Option<Tensor>,
    softcap: Option<f64>,
}

impl EmbedHead {
    /// Embeddings are multiplied by `scale`, rounded to the dtype of the weights. With a soft-cap c, logits `x` become `c·tanh(x/c)`.
    pub fn new(embed_tokens: Tensor, lm_head: Weight, scale: f64, softcap: Option<f64>) -> Self {
        let factor =
            || Tensor::from(scale as f32).to_kind(embed_tokens.kind()).to_device(embed_tokens.device());
        Self { scale: (scale != 1.0).then(factor), embed_tokens, lm_head, softcap }
    }

    /// The embedding as it is stored.
    pub fn embed_tokens(&self) -> &Tensor {
        &self.embed_tokens
    }

    /// The LM head.
    pub fn lm_head(&self) -> &Weight {
        &self.lm_head
    }

    /// Shares both tensors with another model.
    pub fn share(&self) -> Self {
        Self {
            embed_tokens: self.embed_tokens.shallow_clone(),
            lm_head: self.lm_head.share(),
            scale: self.scale.as_ref().map(Tensor::shallow_clone),
            softcap: self.softcap,
        }
    }

    /// Token embeddings `[.., d]`.
    pub fn embed(&self, tokens: &Tensor) -> Tensor {
        let x = Tensor::embedding(&self.embed_tokens, tokens, -1, false, false);
        self.scale.as_ref().map_or_else(|| x.shallow_clone(), |scale| &x * scale)
    }

    /// Float32 logits `[.., V]` of normed hidden states `[.., d]`.
    pub fn logits(&self, hidden: &Tensor) -> Tensor {
        self.logits_with_head(&self.lm_head, hidden)
    }

    /// Float32 logits by `lm_head`, which holds the weight of the head in another form.
    pub fn logits_with_head(&self, lm_head: &Weight, hidden: &Tensor) -> Tensor {
        let logits = linear(hidden, lm_head, None).to_kind(Kind::Float);
        match self.softcap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        }
    }

    /// The LM head for the losses; a packed weight is copied.
    pub fn loss_head(&self) -> LossHead {
        LossHead { weight: self.lm_head.to_tensor(), softcap: self.softcap }
    }
}
