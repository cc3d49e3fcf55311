//! The backbone: draft layers whose queries come from the block and whose keys come from the target's states and the block.

use deepspec_models::nn::{AttentionSpec, Builder, DecoderLayer, Qkv, RmsNorm, Rotation, Rotations};
use deepspec_models::{ModelConfig, ModelError};
use deepspec_native::range;
use tch::{Kind, Tensor};

use super::Anchored;
use super::attention::BlockAttention;
use super::batch::BlockBatch;
use crate::losses;
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

/// What all layers of a pass read.
struct Shared<'a> {
    batch: &'a BlockBatch,
    context_rotations: Rotations<'a>,
    block_rotations: Rotations<'a>,
    /// By what a layer attends to: each sequence's blocks.
    planned: Vec<(AttentionSpec, Vec<BlockAttention>)>,
}

/// A training pass between forward and backward.
pub(crate) struct Pass<'a, K: Anchored> {
    /// As [`Trained::hidden`] gives them.
    pub hidden: Tensor,
    /// None where autograd keeps all that the layers make.
    kept: Option<Kept<'a, K>>,
}

/// What is kept of layers that are computed once more.
struct Kept<'a, K: Anchored> {
    model: &'a Trained<K>,
    shared: Shared<'a>,
    context: Tensor,
    /// The context as the layers see it, a leaf.
    seen: Tensor,
    /// Of each layer.
    inputs: Vec<Tensor>,
    /// The last layer's output, a leaf.
    last: Tensor,
}

impl<K: Anchored> Pass<'_, K> {
    /// Carries the gradients of a surrogate of the losses on to all parameters.
    pub fn backward(self, surrogate: &Tensor) {
        losses::backward(surrogate);
        let Some(Kept { model, shared, context, seen, mut inputs, last }) = self.kept else { return };
        let _range = range(c"backward");
        drop(self.hidden);
        let mut slope = last.grad();
        drop(last);
        for i in (0..inputs.len()).rev() {
            let Some(x) = inputs.pop() else { break };
            // What goes into the first layer is frozen.
            let x = x.detach().set_requires_grad(i > 0);
            let y = model.layer(i, &shared, &seen, &x);
            (y * &slope).sum(Kind::Float).backward();
            slope = x.grad();
        }
        (context * seen.grad()).sum(Kind::Float).backward();
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
        let shared = self.shared(batch);
        let context = self.context(&batch.taps); // [T, d]
        let first = self.embed(&batch.block_tokens.reshape([-1])); // [A·B, d]
        let layers = 0..self.parts.backbone().layers.len();
        let last = layers.fold(first, |x, i| self.layer(i, &shared, &context, &x));
        self.drafting_states(&last)
    }

    /// The same for a training pass, which ends with [`Pass::backward`].
    pub(crate) fn pass<'a>(&'a self, batch: &'a BlockBatch) -> Pass<'a, K> {
        // Without parameters that learn, nothing of the layers is kept anyway.
        let learn = self.parameters().iter().any(|(name, _)| name.starts_with("layers."));
        if !self.recomputes() || !learn {
            return Pass { hidden: self.hidden(batch), kept: None };
        }
        let _range = range(c"forward");
        let shared = self.shared(batch);
        let context = self.context(&batch.taps);
        let seen = context.detach().set_requires_grad(true);
        let mut inputs = vec![self.embed(&batch.block_tokens.reshape([-1]))];
        let mut last = inputs[0].shallow_clone();
        for i in 0..self.parts.backbone().layers.len() {
            last = tch::no_grad(|| self.layer(i, &shared, &seen, &last));
            inputs.push(last.shallow_clone());
        }
        inputs.pop();
        let last = last.set_requires_grad(true);
        let hidden = self.drafting_states(&last);
        Pass { hidden, kept: Some(Kept { model: self, shared, context, seen, inputs, last }) }
    }

    /// What all layers of a pass over a batch read.
    fn shared<'a>(&'a self, batch: &'a BlockBatch) -> Shared<'a> {
        let size = K::blocks(self.config()).block_size;
        let mut planned: Vec<(AttentionSpec, Vec<BlockAttention>)> = vec![];
        for spec in self.attentions() {
            // Layers of one shape share their masks.
            if planned.iter().all(|(known, _)| *known != spec) {
                let attention = batch.attention(&spec, size, self.kind());
                planned.push((spec, attention));
            }
        }
        let context_rotations = self.rotations(&batch.context_positions);
        Shared { batch, context_rotations, block_rotations: self.rotations(&batch.block_positions), planned }
    }

    /// Layer `i` over the rows of all blocks, `[A·B, d]`, behind their context `[T, d]`.
    fn layer(&self, i: usize, shared: &Shared<'_>, context: &Tensor, x: &Tensor) -> Tensor {
        let (layer, spec) = (&self.parts.backbone().layers[i], &self.config().model().layers[i].attention);
        let size = K::blocks(self.config()).block_size;
        let (k, v) = layer.attention.project_context(context, shared.context_rotations.of(i));
        let attend = |block: &Qkv| {
            let attentions = shared.planned.iter().filter(|(known, _)| known == spec).flat_map(|(_, of)| of);
            let outputs: Vec<Tensor> = (shared.batch.spans.iter().zip(attentions))
                .map(|(span, attention)| {
                    let [q, own_k, own_v] = [&block.q, &block.k, &block.v].map(|t| span.rows(t, size));
                    let [k, v] = [&k, &v].map(|t| span.context(t));
                    attention.forward(&Qkv { q, k: own_k, v: own_v }, &k, &v)
                })
                .collect();
            Tensor::cat(&outputs, 0)
        };
        self.run_layer(i, layer, x, shared.block_rotations.of(i), attend)
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
