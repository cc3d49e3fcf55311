//! What planning a training pass goes by.

use deepspec_models::nn::{LayerSpec, Norms, Value};
use deepspec_ops::{AutogradMemory, NORMED};

/// Matrix products of a layer with a weight: queries, keys and values, output, gate and up, down.
pub(crate) const PROJECTIONS: usize = 5;
/// Each of them has gradients by its input and by its weight, which are products of other shapes.
pub(crate) const DIRECTIONS: usize = 3;
/// Kinds of layers by the shapes of their products.
pub(crate) fn layer_shapes(layers: &[LayerSpec]) -> usize {
    let shape = |layer: &LayerSpec| (layer.attention.heads, layer.intermediate_size);
    let is_first = |i: &usize| layers[..*i].iter().all(|other| shape(other) != shape(&layers[*i]));
    (0..layers.len()).filter(is_first).count()
}

/// A sample of a micro-batch, as far as its cost depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleSize {
    /// T.
    pub tokens: usize,
    /// How many of them are supervised.
    pub supervised: usize,
    /// Blocks that start in it; 0 for drafters without anchors.
    pub anchors: usize,
}

/// Bytes that a training pass holds beside weights and gradients.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PassBytes {
    /// Kept from the forward for the backward, but for what stands under `by_layer`.
    pub kept: usize,
    /// Kept by each layer that could be recomputed.
    pub by_layer: Vec<usize>,
    /// What stays of such a layer where it is recomputed.
    pub input: usize,
    /// What carrying gradients from one recomputed layer to the next takes.
    pub between: usize,
    /// What the backward of the layers works with on top, less what it has freed by then; no loss is computed then.
    pub layers: usize,
    /// What the losses work with on top.
    pub objective: usize,
    /// Whether layers are recomputed.
    pub recomputes: bool,
}

impl PassBytes {
    /// Kept from the forward for the backward, when the losses are computed.
    pub fn activations(&self) -> usize {
        let of_layers =
            if self.recomputes { self.by_layer.len() * self.input } else { self.by_layer.iter().sum() };
        self.kept + of_layers
    }

    /// What losses or layers work with on top, at the worst moment.
    pub fn workspace(&self) -> usize {
        let again = if self.recomputes {
            self.by_layer.iter().max().map_or(0, |most| most + self.between)
        } else {
            0
        };
        self.objective.max(again + self.layers)
    }

    /// At the worst moment.
    pub fn peak(&self) -> usize {
        self.activations() + self.workspace()
    }
}

/// Bytes that autograd keeps of the norms that only some families have, in a layer of so many rows which makes values of `sources`
/// rows: those behind attention and MLP, and the values', which libtorch's operator norms.
pub(crate) fn family_norms(layer: &LayerSpec, rows: usize, sources: usize, of: AutogradMemory) -> usize {
    let behind = if layer.norms == Norms::Sandwich { 2 * rows * layer.hidden_size as usize } else { 0 };
    let heads = layer.attention.heads;
    let values =
        if layer.value == Value::Projected { 0 } else { sources * (heads.key_value * heads.dim) as usize };
    behind * of.normed() + values * NORMED
}
