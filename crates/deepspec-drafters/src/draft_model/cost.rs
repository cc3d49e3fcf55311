//! Memory of a training pass.

use deepspec_models::nn::{LayerSpec, Norms, Value};
use deepspec_ops::{AutogradMemory, NORMED};

/// Weighted matrix products of a layer: queries, keys and values, output, gate and up, down.
pub(crate) const PROJECTIONS: usize = 5;
/// Products per weight: the forward, and the gradients of input and weight, of other shapes each.
pub(crate) const DIRECTIONS: usize = 3;
/// Number of distinct layers by the shapes of their products.
pub(crate) fn layer_shapes(layers: &[LayerSpec]) -> usize {
    let shape = |layer: &LayerSpec| (layer.attention.heads, layer.intermediate_size);
    let is_first = |i: &usize| layers[..*i].iter().all(|other| shape(other) != shape(&layers[*i]));
    (0..layers.len()).filter(is_first).count()
}

/// Sizes of a sample of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleSize {
    /// T, its tokens.
    pub tokens: usize,
    /// Number of supervised tokens.
    pub supervised: usize,
    /// Number of its blocks; 0 for autoregressive drafters.
    pub anchors: usize,
}

/// Bytes of a training pass beside weights and gradients.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PassBytes {
    /// Kept from forward to backward, without `by_layer`.
    pub kept: usize,
    /// Kept by each layer that can be recomputed.
    pub by_layer: Vec<usize>,
    /// Kept of a layer that is recomputed.
    pub input: usize,
    /// Gradients between two recomputed layers.
    pub between: usize,
    /// Temporaries of the layers' backward pass, after what it has freed.
    pub layers: usize,
    /// Temporaries of the losses.
    pub objective: usize,
    /// Whether layers are recomputed.
    pub recomputes: bool,
}

impl PassBytes {
    /// Kept from forward to backward while the losses are computed.
    pub fn activations(&self) -> usize {
        let of_layers =
            if self.recomputes { self.by_layer.len() * self.input } else { self.by_layer.iter().sum() };
        self.kept + of_layers
    }

    /// Most temporaries of losses or layers.
    pub fn workspace(&self) -> usize {
        let again = if self.recomputes {
            self.by_layer.iter().max().map_or(0, |most| most + self.between)
        } else {
            0
        };
        self.objective.max(again + self.layers)
    }

    /// Peak.
    pub fn peak(&self) -> usize {
        self.activations() + self.workspace()
    }
}

/// Bytes that autograd keeps of norms that only some families have, in a layer of so many rows with values of `sources` rows: the norms
/// of a sandwich, and the norm of values.
pub(crate) fn family_norms(layer: &LayerSpec, rows: usize, sources: usize, of: AutogradMemory) -> usize {
    let behind = if layer.norms == Norms::Sandwich { 2 * rows * layer.hidden_size as usize } else { 0 };
    let heads = layer.attention.heads;
    let values =
        if layer.value == Value::Projected { 0 } else { sources * (heads.key_value * heads.dim) as usize };
    behind * of.normed() + values * NORMED
}
