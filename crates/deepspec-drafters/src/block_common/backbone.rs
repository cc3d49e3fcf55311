//! Backbone: draft layers whose queries come from the block, and whose keys come from the target's hidden states and the block.

use deepspec_models::ModelConfig;
use deepspec_models::nn::{AttentionSpec, Builder, DecoderLayer, LayerInput, Qkv, RmsNorm, Rotations};
use deepspec_ops::{BlockAttention, RepeatedRows, range};
use tch::{Kind, Tensor};

use super::BackboneDrafter;
use super::batch::BlockBatch;
use crate::GradReadyHook;
use crate::draft_model::{DraftModel, DrafterSettings as _};

/// Prefix of the names of a layer's parameters, before the layer number.
const LAYER_PREFIX: &str = "layers.";
/// Prefixes of the names of all parameters that the layers' outputs depend on: the layers, and the projection and norm of the context.
const BELOW_HEADS: [&str; 3] = [LAYER_PREFIX, "fc.", "hidden_norm."];

/// Draft layers, the norm of the context and the final norm.
pub struct Backbone {
    hidden_norm: RmsNorm,
    pub(super) layers: Vec<DecoderLayer>,
    norm: RmsNorm,
}

impl Backbone {
    /// Requests the tensors from the builder, in the order in which they are trained.
    pub fn new(b: &Builder, model: &ModelConfig) -> Self {
        let layers = model.layers.iter().enumerate();
        Self {
            hidden_norm: RmsNorm::new(b, "hidden_norm", model.hidden_size, model.rms_norm_eps),
            layers: layers
                .map(|(i, spec)| DecoderLayer::new(b, &format!("{LAYER_PREFIX}{i}"), spec))
                .collect(),
            norm: RmsNorm::new(b, "norm", model.hidden_size, model.rms_norm_eps),
        }
    }
}

/// Rotary tables and attention plans that all layers of a pass share.
struct SharedInputs<'a> {
    context_rotations: Rotations<'a>,
    block_rotations: Rotations<'a>,
    /// One attention plan per attention spec.
    planned: Vec<(AttentionSpec, BlockAttention)>,
}

/// A finished forward pass, ready for [`TrainingPass::backward`].
pub(crate) struct TrainingPass<'a, K: BackboneDrafter> {
    /// Hidden states `[A, H, d]` of the slots that the heads read, after the final norm.
    pub hidden: Tensor,
    /// None if autograd differentiates all layers in one backward call.
    layerwise: Option<LayerwiseBackward<'a, K>>,
}

/// Layers whose backward passes run one by one.
struct LayerwiseBackward<'a, K: BackboneDrafter> {
    model: &'a DraftModel<K>,
    shared: SharedInputs<'a>,
    context: Tensor,
    /// Detached copy of `context` that the layers read. It is a leaf tensor, so that its gradient accumulates over the layers.
    leaf: Tensor,
    layers: Vec<SavedLayer>,
    /// Detached output of the last layer, a leaf tensor.
    last: Tensor,
}

/// Input and output of a layer, saved for its backward pass.
struct SavedLayer {
    /// Layer input. It is a leaf unless the layer is recomputed.
    input: Tensor,
    /// Layer output with its graph; None if the layer is recomputed.
    output: Option<Tensor>,
}

impl<K: BackboneDrafter> TrainingPass<'_, K> {
    /// Backpropagates `surrogate`, a scalar whose gradients equal the gradients of the losses. Calls `on_grad_ready` after each layer.
    pub fn backward(self, surrogate: &Tensor, on_grad_ready: Option<GradReadyHook>) {
        let _range = range(c"backward");
        // It has no graph if all trained weights have gradients in closed form, such as the last matrix of a head.
        if surrogate.requires_grad() {
            surrogate.backward();
        }
        let Some(LayerwiseBackward { model, shared, context, leaf, mut layers, last }) = self.layerwise
        else {
            return;
        };
        let mut no_hook = |_| {};
        let on_grad_ready = on_grad_ready.unwrap_or(&mut no_hook);
        drop(self.hidden);
        let mut grad = last.grad();
        drop(last);
        let count = layers.len();
        for i in (0..count).rev() {
            let Some(SavedLayer { input, output }) = layers.pop() else { break };
            let (x, y) = match output {
                Some(y) => (input, y),
                None => {
                    let x = detached_leaf(&input, i);
                    let y = model.forward_layer(i, &shared, &leaf, &x);
                    (x, y)
                }
            };
            (y * &grad).sum(Kind::Float).backward();
            grad = x.grad();
            on_grad_ready(count - i);
        }
        if context.requires_grad() {
            (context * leaf.grad()).sum(Kind::Float).backward();
        }
    }
}

/// Detached input of layer `i`. It requires a gradient, except the first layer's, which is a frozen embedding.
fn detached_leaf(input: &Tensor, i: usize) -> Tensor {
    input.detach().set_requires_grad(i > 0)
}

/// Expands `[A + 1, ..]` rows to `[A·size, ..]`. The first slot of block i gets row i, and all other slots get the last row.
pub(super) fn repeat_over_blocks(rows: &Tensor, size: i64) -> Tensor {
    let blocks = rows.size()[0] - 1;
    let mut others = rows.size();
    others.splice(0..1, [blocks, size - 1]);
    let others = rows.narrow(0, blocks, 1).unsqueeze(0).expand(others, false);
    Tensor::cat(&[rows.narrow(0, 0, blocks).unsqueeze(1), others], 1).flatten(0, 1)
}

impl<K: BackboneDrafter> DraftModel<K> {
    /// Projects captured states `[T, m·d]` to the context `[T, d]`, which all layers read.
    pub fn context_states(&self, taps: &Tensor) -> Tensor {
        self.modules.backbone().hidden_norm.forward(&self.fuse(taps))
    }

    /// Selects the slots that the heads read from rows of whole blocks `[N·B, d]` and applies the final norm: `[N, H, d]`.
    pub(super) fn head_slot_states(&self, x: &Tensor) -> Tensor {
        let (blocks, width) = (K::block_spec(self.config()), self.config().model().hidden_size);
        let size = blocks.block_size as i64;
        let first = match K::Settings::READS_ANCHOR_SLOT {
            true => 0,
            false => blocks.slots.first_drafting_position() as i64,
        };
        // Contiguous, because the norm saves its input.
        let read = x.view([-1, size, width]).narrow(1, first, size - first).contiguous();
        self.modules.backbone().norm.forward(&read)
    }

    /// Hidden states `[A, H, d]` of all blocks' slots that the heads read, after the final norm.
    pub fn hidden_states(&self, batch: &BlockBatch) -> Tensor {
        let _range = range(c"forward");
        let shared = self.shared_inputs(batch);
        let context = self.context_states(&batch.taps); // [T, d]
        let first = self.embed(&batch.block_tokens.reshape([-1])); // [A·B, d]
        let layers = 0..self.modules.backbone().layers.len();
        let last = layers.fold(first, |x, i| self.forward_layer(i, &shared, &context, &x));
        self.head_slot_states(&last)
    }

    /// Forward of a training pass. The backward runs layer by layer if layers are recomputed or there is an `on_grad_ready` hook, and in
    /// one call otherwise.
    pub(crate) fn training_pass<'a>(&'a self, batch: &'a BlockBatch, has_hook: bool) -> TrainingPass<'a, K> {
        let recompute = self.recomputes();
        if !(recompute || has_hook) || !self.trains_below_heads() {
            return TrainingPass { hidden: self.hidden_states(batch), layerwise: None };
        }
        let _range = range(c"forward");
        let shared = self.shared_inputs(batch);
        let context = self.context_states(&batch.taps);
        let leaf = context.detach().set_requires_grad(true);
        let mut layers = vec![];
        let mut x = self.embed(&batch.block_tokens.reshape([-1]));
        for i in 0..self.modules.backbone().layers.len() {
            let input = if recompute { x } else { detached_leaf(&x, i) };
            let run = || self.forward_layer(i, &shared, &leaf, &input);
            let output = if recompute { tch::no_grad(run) } else { run() };
            x = output.detach();
            layers.push(SavedLayer { input, output: (!recompute).then_some(output) });
        }
        let last = x.set_requires_grad(true);
        let hidden = self.head_slot_states(&last);
        let layerwise = LayerwiseBackward { model: self, shared, context, leaf, layers, last };
        TrainingPass { hidden, layerwise: Some(layerwise) }
    }

    /// Whether gradients pass through the layers, to their own parameters or to those of the context. Otherwise autograd saves nothing of
    /// the layers.
    fn trains_below_heads(&self) -> bool {
        let is_below = |name: &str| BELOW_HEADS.iter().any(|prefix| name.starts_with(prefix));
        self.parameters().iter().any(|(name, _)| is_below(name))
    }

    /// See [`TrainableDrafter::grad_stages`]: prefixes of the layers, last layer first.
    pub(crate) fn layer_grad_stages(&self) -> Vec<String> {
        let layers = 0..self.modules.backbone().layers.len();
        layers.rev().map(|i| format!("{LAYER_PREFIX}{i}.")).collect()
    }

    fn shared_inputs<'a>(&'a self, batch: &'a BlockBatch) -> SharedInputs<'a> {
        let shape = K::block_spec(self.config()).shape();
        let mut planned: Vec<(AttentionSpec, BlockAttention)> = vec![];
        for spec in self.attention_specs() {
            // Layers with equal specs share a plan.
            if planned.iter().all(|(known, _)| *known != spec) {
                let attention = BlockAttention::new(&spec, shape, &batch.spans, self.kind());
                planned.push((spec, attention));
            }
        }
        let context_rotations = self.rotations(&batch.context_positions);
        SharedInputs { context_rotations, block_rotations: self.rotations(&batch.block_positions), planned }
    }

    /// Runs layer `i` over the rows of all blocks, `[A·B, d]`, with the context `[T, d]`.
    fn forward_layer(&self, i: usize, shared: &SharedInputs<'_>, context: &Tensor, x: &Tensor) -> Tensor {
        let (layer, spec) = (&self.modules.backbone().layers[i], &self.config().model().layers[i].attention);
        let size = K::block_spec(self.config()).block_size;
        let (k, v) = layer.attention.project_context(context, shared.context_rotations.layer(i));
        let mut attend = |block: &Qkv| {
            let planned = shared.planned.iter().find(|(known, _)| known == spec);
            let (_, attention) = planned.expect("every layer has a plan");
            attention.forward(block, &k, &v)
        };
        let (rotation, hook) = (shared.block_rotations.layer(i), self.modules.layer_hook(i));
        if i > 0 || size == 1 || hook.is_some() {
            return layer.forward(x.into(), rotation, &mut attend, hook);
        }
        // Only A + 1 rows differ: the first slots have their anchors' embeddings, and all other slots have the mask token's.
        let first_slots = x.view([-1, size as i64, x.size()[1]]).select(1, 0);
        let distinct = Tensor::cat(&[first_slots, x.narrow(0, 1, 1)], 0);
        let repeat = |rows: &Tensor| repeat_over_blocks(rows, size as i64);
        let repeated = Some(RepeatedRows { distinct: &distinct, repeat: &repeat });
        layer.forward(LayerInput { x, repeated, embeddings: None }, rotation, &mut attend, None)
    }
}
