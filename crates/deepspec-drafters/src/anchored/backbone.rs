//! The backbone: draft layers whose queries come from the block and whose keys come from the target's states and the block.

use deepspec_models::nn::{AttentionSpec, Builder, DecoderLayer, Qkv, RmsNorm, Rotation};
use deepspec_models::{ModelConfig, ModelError};
use deepspec_native::range;
use tch::Tensor;

use super::Anchored;
use super::attention::BlockAttention;
use super::batch::BlockBatch;
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
        let _range = range(c"forward");
        let context = self.context(&batch.taps); // [T, d]
        let context_rotations = self.rotations(&batch.context_positions);
        let block_rotations = self.rotations(&batch.block_positions);
        let mut x = self.embed(&batch.block_tokens.reshape([-1])); // [A·B, d]
        let size = K::blocks(self.config()).block_size;
        let layers = self.parts.backbone().layers.iter().zip(&self.config().model().layers);
        let mut planned: Vec<(AttentionSpec, Vec<BlockAttention>)> = vec![];
        for (i, (layer, spec)) in layers.enumerate() {
            // Layers of one shape share their masks.
            let known = planned.iter().position(|(known, _)| *known == spec.attention);
            let known = known.unwrap_or_else(|| {
                planned.push((spec.attention, batch.attention(&spec.attention, size, self.kind())));
                planned.len() - 1
            });
            let (k, v) = layer.attention.project_context(&context, context_rotations.of(i));
            let attend = |block: &Qkv| {
                let outputs: Vec<Tensor> = (batch.spans.iter().zip(&planned[known].1))
                    .map(|(span, attention)| {
                        let [q, own_k, own_v] = [&block.q, &block.k, &block.v].map(|t| span.rows(t, size));
                        let [k, v] = [&k, &v].map(|t| span.context(t));
                        attention.forward(&Qkv { q, k: own_k, v: own_v }, &k, &v)
                    })
                    .collect();
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
}
