//! The backbone: draft layers whose queries come from the block and whose keys come from the target's states and the block.

use deepspec_models::nn::{AttentionSpec, Builder, DecoderLayer, Heads, Qkv, RmsNorm, Rotation};
use deepspec_models::{ModelConfig, ModelError};
use tch::Tensor;

use super::Anchored;
use super::batch::{BlockBatch, SequenceSpan};
use crate::trained::{DrafterConfig, Trained};

/// Draft layers between two norms.
pub struct Backbone {
    hidden_norm: RmsNorm,
    pub(super) layers: Vec<DecoderLayer>,
    norm: RmsNorm,
}

impl Backbone {
    /// Asks for the tensors in the order in which they are trained.
    ///
    /// # Errors
    /// A tensor is missing or misshapen.
    pub fn new(b: &Builder, model: &ModelConfig) -> Result<Self, ModelError> {
        let layers = model.layers.iter().enumerate();
        Ok(Self {
            hidden_norm: RmsNorm::new(b, "hidden_norm", model.hidden_size, model.rms_norm_eps)?,
            layers: layers
                .map(|(i, spec)| DecoderLayer::new(b, &format!("layers.{i}"), spec))
                .collect::<Result<_, _>>()?,
            norm: RmsNorm::new(b, "norm", model.hidden_size, model.rms_norm_eps)?,
        })
    }
}

impl<K: Anchored> Trained<K> {
    /// Captured states `[T, m·d]` to the context `H [T, d]` that all layers share.
    pub fn context(&self, taps: &Tensor) -> Tensor {
        self.parts.backbone().hidden_norm.forward(&self.fuse(taps))
    }

    /// Head without any bias, float32: `[.., d]` to `[.., V]`. Also gives the target's logits from its last hidden states.
    pub fn base_logits(&self, hidden: &Tensor) -> Tensor {
        self.vocabulary().logits(hidden)
    }

    /// See [`Anchored::features`].
    pub fn features(&self, hidden: &Tensor, previous: &Tensor) -> Option<(Tensor, Tensor)> {
        K::features(self, hidden, previous)
    }

    /// See [`Anchored::slot_logits`].
    pub fn slot_logits(&self, hidden: &Tensor, features: Option<&Tensor>) -> Tensor {
        K::slot_logits(self, hidden, features)
    }

    /// See [`Anchored::confidence`].
    pub fn confidence_logits(&self, hidden: &Tensor, embeddings: Option<&Tensor>) -> Option<Tensor> {
        K::confidence(self, hidden, embeddings)
    }

    /// The states of rows of whole blocks, `[N·B, d]`, that the heads read: those of the slots that draft, `[N, γ, d]`.
    pub(super) fn drafting_states(&self, x: &Tensor) -> Tensor {
        let (blocks, width) = (K::blocks(self.config()), self.config().model().hidden_size);
        let (first, gamma) = (blocks.slots.first() as i64, blocks.drafted() as i64);
        let drafting = x.view([-1, blocks.block_size as i64, width]).narrow(1, first, gamma);
        self.parts.backbone().norm.forward(&drafting)
    }

    /// All blocks of a batch in one pass: `h [A, γ, d]` of the slots that draft, after the final norm.
    pub fn hidden(&self, batch: &BlockBatch) -> Tensor {
        let context = self.context(&batch.taps); // [T, d]
        let context_rotations = self.rotations(&batch.context_positions);
        let block_rotations = self.rotations(&batch.block_positions);
        let mut x = self.embed(&batch.block_tokens.reshape([-1])); // [A·B, d]
        let layers = self.parts.backbone().layers.iter().zip(&self.config().model().layers);
        for (i, (layer, spec)) in layers.enumerate() {
            let (k, v) = layer.attention.project_context(&context, context_rotations.of(i));
            let attend = |block: &Qkv| {
                let attend = |span| self.attend(&spec.attention, span, block, &k, &v);
                let outputs: Vec<Tensor> = batch.spans.iter().map(attend).collect();
                Tensor::cat(&outputs, 0)
            };
            x = self.run_layer(i, layer, &x, block_rotations.of(i), attend);
        }
        self.drafting_states(&x)
    }

    /// Layer `i` over rows of whole blocks, `[N·B, d]`.
    pub(super) fn run_layer(
        &self,
        i: usize,
        layer: &DecoderLayer,
        x: &Tensor,
        rotation: &Rotation,
        attend: impl FnMut(&Qkv) -> Tensor,
    ) -> Tensor {
        let around = |half, normed: &Tensor, run: &mut dyn FnMut(&Tensor) -> Tensor| {
            self.parts.around(i, half, normed, run)
        };
        layer.forward_around(x, rotation, attend, around)
    }

    /// Attention of one sequence's blocks: each sees the context strictly before its anchor, and itself; no block sees another.
    ///
    /// Scores against context and block are computed apart and share one softmax, so that the A·B × A·B part never exists.
    fn attend(
        &self,
        spec: &AttentionSpec,
        span: &SequenceSpan,
        block: &Qkv,
        k: &Tensor,
        v: &Tensor,
    ) -> Tensor {
        let AttentionSpec { heads: Heads { query, key_value, dim }, scale, window } = *spec;
        let (size, repeats) = (K::blocks(self.config()).block_size as i64, query / key_value);
        let (blocks, tokens) = (span.block_count, span.token_count);
        let rows = |t: &Tensor| t.narrow(0, span.first_block * size, blocks * size);
        // [A·B, H, D] -> [G, A, repeats·B, D]: heads that share keys become further queries.
        let q = rows(&block.q).view([blocks, size, key_value, repeats, dim]).permute([2, 0, 3, 1, 4]);
        let q = q.reshape([key_value, blocks, repeats * size, dim]) * scale;
        let own = |t: &Tensor| rows(t).view([blocks, size, key_value, dim]).permute([2, 0, 1, 3]); // [G, A, B, D]
        let context = |t: &Tensor| t.narrow(0, span.first_token, tokens).transpose(0, 1); // [G, T, D]

        let flat = [key_value, blocks * repeats * size, dim];
        let mut to_context =
            q.view(flat).bmm(&context(k).transpose(1, 2)).view([key_value, blocks, repeats * size, tokens])
                + &span.mask;
        let mut to_block = q.matmul(&own(&block.k).transpose(2, 3)); // [G, A, repeats·B, B]
        if let Some(window) = window {
            let (context, block) = span.outside(size, window as i64);
            to_context += context.repeat([1, repeats, 1]);
            to_block += block.repeat([repeats, 1]);
        }
        let weights = Tensor::cat(&[to_context, to_block], 3).softmax(-1, self.kind());
        let on_context = weights.narrow(3, 0, tokens).reshape([key_value, -1, tokens]).bmm(&context(v));
        let on_block = weights.narrow(3, tokens, size).matmul(&own(&block.v));
        let y = on_context.view_as(&on_block) + on_block;
        y.view([key_value, blocks, repeats, size, dim])
            .permute([1, 3, 0, 2, 4])
            .reshape([blocks * size, query * dim])
    }
}
