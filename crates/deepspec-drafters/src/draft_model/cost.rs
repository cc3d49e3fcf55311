//! Memory of a training pass, estimated from the rows that it computes.

use deepspec_models::nn::{LayerSpec, Norms, Value};
use deepspec_ops::{SavedTensors, distill_loss};
use tch::{Device, Kind};

use super::DraftDecoder;

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

/// Rows of a pass over a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassRows {
    /// Rows that run through the layers.
    pub layers: usize,
    /// Context tokens, whose keys and values every layer projects.
    pub context: usize,
    /// Rows with a loss.
    pub supervised: usize,
    /// Values that the drafter's own parts keep of a row in each layer.
    pub own_values: usize,
    /// Values that attention keeps in each layer beside queries, keys, values and output.
    pub attention: usize,
}

impl PassRows {
    /// Estimated peak bytes of forward and backward pass, beside weights and gradients.
    ///
    /// The estimate counts the tensors that autograd keeps for each row, the gradients of one layer, and the buffers of the losses. It
    /// leaves out the heads of a drafter.
    pub fn activation_bytes(
        &self,
        decoder: &DraftDecoder,
        kind: Kind,
        device: Device,
        recomputes: bool,
    ) -> usize {
        let Self { layers: rows, context, supervised, own_values, attention } = *self;
        let (model, value) = (&decoder.model, kind.elt_size_in_bytes());
        let d = model.hidden_size as usize;
        let by_layer = model.layers.iter().map(|layer| {
            let saved = SavedTensors::of(kind, device, layer.activation);
            let row = row_bytes(layer, saved, value) + own_values * value;
            rows * row + context * key_value_bytes(layer, saved, value) + attention * value
        });
        let (kept, largest) = (by_layer.clone().sum::<usize>(), by_layer.max().unwrap_or(0));
        let of_layers = if recomputes { model.layers.len() * rows * d * value + largest } else { kept };
        // Gradients of a layer are about half of its activations.
        let gradients = largest / 2;
        let inputs = (context * (decoder.taps.len() + 2) + supervised * 3) * d * value;
        of_layers
            + gradients
            + inputs
            + distill_loss::buffer_bytes(model.vocab_size, supervised, kind, device)
    }
}

/// Bytes that autograd saves of a row in a layer: its norms, queries, keys and values, the attention's output, and the MLP.
fn row_bytes(layer: &LayerSpec, saved: SavedTensors, value: usize) -> usize {
    let (d, heads) = (layer.hidden_size as usize, layer.attention.heads);
    let queries = (heads.query * heads.dim) as usize;
    // Norms after attention and MLP have no product after them that would save their output.
    let after = if layer.norms == Norms::Sandwich { 2 * saved.norm } else { 0 };
    let head_norm = if layer.qk_norm { saved.norm } else { 0 };
    d * (2 * (saved.norm + value) + after)
        + queries * (head_norm + 3 * value)
        + key_value_bytes(layer, saved, value)
        + saved.mlp * layer.intermediate_size as usize * value
}

/// Bytes that autograd saves of a row's keys and values.
fn key_value_bytes(layer: &LayerSpec, saved: SavedTensors, value: usize) -> usize {
    let heads = layer.attention.heads;
    let head_norm = if layer.qk_norm { saved.norm } else { 0 };
    let value_norm = if layer.value == Value::Projected { 0 } else { saved.norm };
    (heads.key_value * heads.dim) as usize * (head_norm + value_norm + 3 * value)
}
