//! The backbone: draft layers with queries from the block, and keys from the target's hidden states and the block.

use deepspec_models::ModelConfig;
use deepspec_models::nn::{AttentionSpec, Builder, DecoderLayer, LayerInput, Qkv, RmsNorm, Rotations};
use deepspec_ops::{BlockAttention, RepeatedRows, range};
use tch::{Kind, Tensor};

use super::BlockDrafter;
use super::batch::BlockBatch;
use crate::GradReadyHook;
use crate::draft_model::DraftModel;

/// Prefix of a layer's number in the names of its parameters.
const LAYERS: &str = "layers.";

/// Draft layers between two norms.
pub struct Backbone {
    hidden_norm: RmsNorm,
    pub(super) layers: Vec<DecoderLayer>,
    norm: RmsNorm,
}

impl Backbone {
    /// Asks for the tensors in the order in which they are trained.
    pub fn new(b: &Builder, model: &ModelConfig) -> Self {
        let layers = model.layers.iter().enumerate();
        Self {
            hidden_norm: RmsNorm::new(b, "hidden_norm", model.hidden_size, model.rms_norm_eps),
            layers: layers.map(|(i, spec)| DecoderLayer::new(b, &format!("{LAYERS}{i}"), spec)).collect(),
            norm: RmsNorm::new(b, "norm", model.hidden_size, model.rms_norm_eps),
        }
    }
}

/// Tensors that all layers of a pass read.
struct Shared<'a> {
    context_rotations: Rotations<'a>,
    block_rotations: Rotations<'a>,
    /// Attention plans by the shape of a layer's attention.
    planned: Vec<(AttentionSpec, BlockAttention)>,
}

/// A training pass between its forward and its backward.
pub(crate) struct Pass<'a, K: BlockDrafter> {
    /// Hidden states, as [`DraftModel::hidden`] computes them.
    pub hidden: Tensor,
    /// None where autograd runs through all layers at once.
    apart: Option<LayerwiseBackward<'a, K>>,
}

/// Layers whose backward passes run one by one.
struct LayerwiseBackward<'a, K: BlockDrafter> {
    model: &'a DraftModel<K>,
    shared: Shared<'a>,
    context: Tensor,
    /// The context that the layers read, a leaf of autograd.
    seen: Tensor,
    layers: Vec<Kept>,
    /// The last layer's output, a leaf of autograd.
    last: Tensor,
}

/// Tensors that are kept of a layer.
struct Kept {
    /// The layer's input: a leaf, unless the layer is recomputed.
    input: Tensor,
    /// None where the layer is recomputed.
    output: Option<Tensor>,
}

impl<K: BlockDrafter> Pass<'_, K> {
    /// Runs the backward pass of a surrogate of the losses; `on_grad_ready` is called after each layer.
    pub fn backward(self, surrogate: &Tensor, on_grad_ready: Option<GradReadyHook>) {
        let _range = range(c"backward");
        surrogate.backward();
        let Some(LayerwiseBackward { model, shared, context, seen, mut layers, last }) = self.apart else {
            return;
        };
        let mut nobody = |_| {};
        let on_grad_ready = on_grad_ready.unwrap_or(&mut nobody);
        drop(self.hidden);
        let mut slope = last.grad();
        drop(last);
        let count = layers.len();
        for i in (0..count).rev() {
            let Some(Kept { input, output }) = layers.pop() else { break };
            let (x, y) = match output {
                Some(y) => (input, y),
                None => {
                    let x = leaf(&input, i);
                    let y = model.layer(i, &shared, &seen, &x);
                    (x, y)
                }
            };
            (y * &slope).sum(Kind::Float).backward();
            slope = x.grad();
            on_grad_ready(count - i);
        }
        if context.requires_grad() {
            (context * seen.grad()).sum(Kind::Float).backward();
        }
    }
}

/// The input of layer `i`, detached. The first layer's input is frozen.
fn leaf(input: &Tensor, i: usize) -> Tensor {
    input.detach().set_requires_grad(i > 0)
}

/// Repeats `[A + 1, ..]` rows over blocks, to `[A·size, ..]`. The first slot of block i gets row i, and all other slots get
/// the last row.
pub(super) fn over_blocks(rows: &Tensor, size: i64) -> Tensor {
    let blocks = rows.size()[0] - 1;
    let mut others = rows.size();
    others.splice(0..1, [blocks, size - 1]);
    let others = rows.narrow(0, blocks, 1).unsqueeze(0).expand(others, false);
    Tensor::cat(&[rows.narrow(0, 0, blocks).unsqueeze(1), others], 1).flatten(0, 1)
}

impl<K: BlockDrafter> DraftModel<K> {
    /// Captured states `[T, m·d]` to the context `H [T, d]` that all layers share.
    pub fn context(&self, taps: &Tensor) -> Tensor {
        self.parts.backbone().hidden_norm.forward(&self.fuse(taps))
    }

    /// Float32 logits of the shared head without a bias: `[.., d]` to `[.., V]`. They are the target's for its final hidden states.
    pub fn base_logits(&self, hidden: &Tensor) -> Tensor {
        self.vocabulary().logits(hidden)
    }

    /// See [`BlockDrafter::logit_features`].
    pub fn logit_features(&self, hidden: &Tensor, previous: &Tensor) -> Option<(Tensor, Tensor)> {
        K::logit_features(self, hidden, previous)
    }

    /// See [`BlockDrafter::slot_logits`].
    pub fn slot_logits(&self, hidden: &Tensor, features: Option<&Tensor>) -> Tensor {
        K::slot_logits(self, hidden, features)
    }

    /// See [`BlockDrafter::confidence`].
    pub fn confidence_logits(&self, hidden: &Tensor, embeddings: Option<&Tensor>) -> Option<Tensor> {
        K::confidence(self, hidden, embeddings)
    }

    /// Normed hidden states of the slots that draft, `[N, γ, d]`, from rows of whole blocks `[N·B, d]`.
    pub(super) fn drafting_states(&self, x: &Tensor) -> Tensor {
        let (blocks, width) = (K::blocks(self.config()), self.config().model().hidden_size);
        let (first, gamma) = (blocks.slots.first() as i64, blocks.drafted() as i64);
        // Contiguous, as the norm reads and keeps rows.
        let drafting = x.view([-1, blocks.block_size as i64, width]).narrow(1, first, gamma).contiguous();
        self.parts.backbone().norm.forward(&drafting)
    }

    /// Hidden states of all blocks of a batch in one pass: `[A, γ, d]` of the slots that draft, after the final norm.
    pub fn hidden(&self, batch: &BlockBatch) -> Tensor {
        let _range = range(c"forward");
        let shared = self.shared(batch);
        let context = self.context(&batch.taps); // [T, d]
        let first = self.embed(&batch.block_tokens.reshape([-1])); // [A·B, d]
        let layers = 0..self.parts.backbone().layers.len();
        let last = layers.fold(first, |x, i| self.layer(i, &shared, &context, &x));
        self.drafting_states(&last)
    }

    /// A training pass, which ends with [`Pass::backward`]. Backward passes run layer by layer with recomputation or an `on_grad_ready` hook.
    pub(crate) fn pass<'a>(&'a self, batch: &'a BlockBatch, is_heard: bool) -> Pass<'a, K> {
        let again = self.recomputes();
        if !(again || is_heard) || !self.layers_learn() {
            return Pass { hidden: self.hidden(batch), apart: None };
        }
        let _range = range(c"forward");
        let shared = self.shared(batch);
        let context = self.context(&batch.taps);
        let seen = context.detach().set_requires_grad(true);
        let mut layers = vec![];
        let mut x = self.embed(&batch.block_tokens.reshape([-1]));
        for i in 0..self.parts.backbone().layers.len() {
            let input = if again { x } else { leaf(&x, i) };
            let run = || self.layer(i, &shared, &seen, &input);
            let output = if again { tch::no_grad(run) } else { run() };
            x = output.detach();
            layers.push(Kept { input, output: (!again).then_some(output) });
        }
        let last = x.set_requires_grad(true);
        let hidden = self.drafting_states(&last);
        Pass { hidden, apart: Some(LayerwiseBackward { model: self, shared, context, seen, layers, last }) }
    }

    /// Whether any layer is trained. Autograd keeps nothing of frozen layers.
    fn layers_learn(&self) -> bool {
        self.parameters().iter().any(|(name, _)| name.starts_with(LAYERS))
    }

    /// See [`TrainableDrafter::stages`]: the layers, the last one first.
    pub(crate) fn layer_stages(&self) -> Vec<String> {
        let layers = 0..self.parts.backbone().layers.len();
        layers.rev().map(|i| format!("{LAYERS}{i}.")).collect()
    }

    /// Tensors that all layers of a pass over a batch read.
    fn shared<'a>(&'a self, batch: &'a BlockBatch) -> Shared<'a> {
        let size = K::blocks(self.config()).block_size;
        let mut planned: Vec<(AttentionSpec, BlockAttention)> = vec![];
        for spec in self.attentions() {
            // Layers of one shape share their masks.
            if planned.iter().all(|(known, _)| *known != spec) {
                let attention = BlockAttention::new(&spec, size, &batch.spans, self.kind());
                planned.push((spec, attention));
            }
        }
        let context_rotations = self.rotations(&batch.context_positions);
        Shared { context_rotations, block_rotations: self.rotations(&batch.block_positions), planned }
    }

    /// Layer `i` over the rows of all blocks, `[A·B, d]`, with their context `[T, d]`.
    fn layer(&self, i: usize, shared: &Shared<'_>, context: &Tensor, x: &Tensor) -> Tensor {
        let (layer, spec) = (&self.parts.backbone().layers[i], &self.config().model().layers[i].attention);
        let size = K::blocks(self.config()).block_size;
        let (k, v) = layer.attention.project_context(context, shared.context_rotations.of(i));
        let mut attend = |block: &Qkv| {
            let planned = shared.planned.iter().find(|(known, _)| known == spec);
            let (_, attention) = planned.expect("all layers' were planned");
            attention.forward(block, &k, &v)
        };
        let (rotation, hook) = (shared.block_rotations.of(i), self.parts.hook(i));
        if i > 0 || size == 1 || hook.is_some() {
            return layer.forward(x.into(), rotation, &mut attend, hook);
        }
        // The first slot of each block has its anchor's embedding, and all others have the mask token's (`BlockBatch`).
        let first_slots = x.view([-1, size as i64, x.size()[1]]).select(1, 0);
        let distinct = Tensor::cat(&[first_slots, x.narrow(0, 1, 1)], 0);
        let repeat = |rows: &Tensor| over_blocks(rows, size as i64);
        let repeated = Some(RepeatedRows { distinct: &distinct, repeat: &repeat });
        layer.forward(LayerInput { x, repeated, embeddings: None }, rotation, &mut attend, None)
    }
}
