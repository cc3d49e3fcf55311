//! The backbone: draft layers whose queries come from the block and whose keys come from the target's states and the block.

use deepspec_models::ModelError;
use deepspec_models::nn::{AttentionSpec, Builder, DecoderLayer, Heads, Qkv, RmsNorm};
use tch::{Kind, Tensor};

use super::batch::{BlockBatch, SequenceSpan};
use super::config::BlockConfig;
use super::heads::{ConfidenceHead, MarkovHead};
use crate::trained::Trained;

/// A DSpark or DFlash drafter.
pub type Block = Trained<BlockParts>;

/// Draft layers, norms and heads.
pub struct BlockParts {
    hidden_norm: RmsNorm,
    pub(super) layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    pub(super) markov: Option<MarkovHead>,
    pub(super) confidence: Option<ConfidenceHead>,
}

impl BlockParts {
    /// Asks for the tensors in the order in which they are trained.
    ///
    /// # Errors
    /// A tensor is missing or misshapen.
    pub(super) fn build(b: &Builder, config: &BlockConfig) -> Result<Self, ModelError> {
        let c = &config.model;
        let layers = c.layers.iter().enumerate();
        Ok(Self {
            hidden_norm: RmsNorm::new(b, "hidden_norm", c.hidden_size, c.rms_norm_eps)?,
            layers: layers
                .map(|(i, spec)| DecoderLayer::new(b, &format!("layers.{i}"), spec))
                .collect::<Result<_, _>>()?,
            norm: RmsNorm::new(b, "norm", c.hidden_size, c.rms_norm_eps)?,
            markov: config
                .markov
                .map(|markov| MarkovHead::new(b, markov, c.vocab_size, c.hidden_size))
                .transpose()?,
            confidence: ConfidenceHead::new(b, config)?,
        })
    }
}

impl Block {
    /// Captured states `[T, m·d]` to the context `H [T, d]` that all layers share.
    pub fn context(&self, taps: &Tensor) -> Tensor {
        self.parts.hidden_norm.forward(&self.fuse(taps))
    }

    /// The state every head reads.
    pub(super) fn final_norm(&self, x: &Tensor) -> Tensor {
        self.parts.norm.forward(x)
    }

    /// Head without any bias, float32: `[.., d]` to `[.., V]`. Also gives the target's logits from its last hidden states.
    pub fn base_logits(&self, hidden: &Tensor) -> Tensor {
        self.vocabulary().logits(hidden)
    }

    /// All blocks of a batch in one pass: `h [A, γ, d]` after the final norm.
    pub fn hidden(&self, batch: &BlockBatch) -> Tensor {
        let context = self.context(&batch.taps); // [T, d]
        let context_rotations = self.rotations(&batch.context_positions);
        let block_rotations = self.rotations(&batch.block_positions);
        let mut x = self.embed(&batch.block_tokens.reshape([-1])); // [A·γ, d]
        for (i, (layer, spec)) in self.parts.layers.iter().zip(&self.config().model.layers).enumerate() {
            let (k, v) = layer.attention.project_context(&context, context_rotations.of(i));
            x = layer.forward(&x, block_rotations.of(i), |block| {
                let attend = |span| self.attend(&spec.attention, span, block, &k, &v);
                let outputs: Vec<Tensor> = batch.spans.iter().map(attend).collect();
                Tensor::cat(&outputs, 0)
            });
        }
        let gamma = self.config().block_size as i64;
        self.final_norm(&x).view([-1, gamma, self.config().model.hidden_size])
    }

    /// Attention of one sequence's blocks: each sees the context strictly before its anchor, and itself; no block sees another.
    ///
    /// Scores against context and block are computed apart and share one softmax, so that the A·γ × A·γ part never exists.
    fn attend(
        &self,
        spec: &AttentionSpec,
        span: &SequenceSpan,
        block: &Qkv,
        k: &Tensor,
        v: &Tensor,
    ) -> Tensor {
        let AttentionSpec { heads: Heads { query, key_value, dim }, scale, window } = *spec;
        let (gamma, repeats) = (self.config().block_size as i64, query / key_value);
        let (blocks, tokens) = (span.block_count, span.token_count);
        let rows = |t: &Tensor| t.narrow(0, span.first_block * gamma, blocks * gamma);
        // [A·γ, H, D] -> [G, A, repeats·γ, D]: heads that share keys become further queries.
        let q = rows(&block.q).view([blocks, gamma, key_value, repeats, dim]).permute([2, 0, 3, 1, 4]);
        let q = q.reshape([key_value, blocks, repeats * gamma, dim]) * scale;
        let own = |t: &Tensor| rows(t).view([blocks, gamma, key_value, dim]).permute([2, 0, 1, 3]); // [G, A, γ, D]
        let context = |t: &Tensor| t.narrow(0, span.first_token, tokens).transpose(0, 1); // [G, T, D]

        let flat = [key_value, blocks * repeats * gamma, dim];
        let mut to_context =
            q.view(flat).bmm(&context(k).transpose(1, 2)).view([key_value, blocks, repeats * gamma, tokens])
                + &span.mask;
        let mut to_block = q.matmul(&own(&block.k).transpose(2, 3)); // [G, A, repeats·γ, γ]
        if let Some(window) = window {
            let (context, block) = span.outside(gamma, window as i64);
            to_context += context.repeat([1, repeats, 1]);
            to_block += block.repeat([repeats, 1]);
        }
        let weights = Tensor::cat(&[to_context, to_block], 3).softmax(-1, self.kind());
        let on_context = weights.narrow(3, 0, tokens).reshape([key_value, -1, tokens]).bmm(&context(v));
        let on_block = weights.narrow(3, tokens, gamma).matmul(&own(&block.v));
        let y = on_context.view_as(&on_block) + on_block;
        y.view([key_value, blocks, repeats, gamma, dim])
            .permute([1, 3, 0, 2, 4])
            .reshape([blocks * gamma, query * dim])
    }

    /// Logits of slots with teacher-forced previous tokens, float32 `[R, V]`: `hidden [R, d]` and Markov features `[R, r]`.
    pub fn corrected_logits(&self, hidden: &Tensor, features: Option<&Tensor>) -> Tensor {
        let base = self.base_logits(hidden);
        match (&self.parts.markov, features) {
            (Some(markov), Some(features)) => base + markov.bias(features).to_kind(Kind::Float),
            _ => base,
        }
    }

    /// Embeddings of the previous tokens and Markov features of whole blocks, both `[A, γ, r]`; None without a Markov head.
    pub fn markov_features(&self, hidden: &Tensor, previous: &Tensor) -> Option<(Tensor, Tensor)> {
        self.parts.markov.as_ref().map(|markov| {
            let e = markov.embed(previous);
            let features = markov.features(hidden, &e);
            (e, features)
        })
    }

    /// Confidence logits `[..]`; None without a confidence head.
    pub fn confidence_logits(&self, hidden: &Tensor, e: Option<&Tensor>) -> Option<Tensor> {
        self.parts.confidence.as_ref().map(|head| head.forward(hidden, e).to_kind(Kind::Float))
    }
}
