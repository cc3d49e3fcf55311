//! What planning a training pass goes by.

use crate::nn::{LayerSpec, Norms, Value};

/// Bytes that autograd keeps of a value that is normed, whatever its kind: itself and its normed form in float32.
pub(super) const NORMED: usize = 8;
/// What it keeps of a value of the MLP's insides: gate, its activation, up, and their product.
pub(super) const MLP: usize = 4;
/// Gradients of the MLP's insides at a time: of the product and of its two factors.
pub(super) const MLP_AT_WORK: usize = 3;

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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PassBytes {
    /// Kept from the forward for the backward.
    pub kept: usize,
    /// What the backward of the layers works with on top, less what it has freed by then; no loss is computed then.
    pub layers: usize,
    /// What the losses work with on top.
    pub objective: usize,
}

impl PassBytes {
    /// At the worst moment.
    pub fn peak(&self) -> usize {
        self.kept + self.layers.max(self.objective)
    }
}

/// Bytes that autograd keeps of the norms that only some families have, in a layer of so many rows which makes values of `sources`
/// rows: those behind attention and MLP, and the values'.
pub(super) fn family_norms(layer: &LayerSpec, rows: usize, sources: usize) -> usize {
    let behind = if layer.norms == Norms::Sandwich { 2 * rows * layer.hidden_size as usize } else { 0 };
    let heads = layer.attention.heads;
    let values =
        if layer.value == Value::Projected { 0 } else { sources * (heads.key_value * heads.dim) as usize };
    (behind + values) * NORMED
}
