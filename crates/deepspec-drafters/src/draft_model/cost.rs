//! Memory of a training pass, estimated from the rows that it computes.

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
    /// Tokens, whose hidden states the pass reads.
    pub tokens: usize,
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
        let Self { layers: rows, tokens, context, supervised, own_values, attention } = *self;
        let (model, value) = (&decoder.model, kind.elt_size_in_bytes());
        let d = model.hidden_size as usize;
        let by_layer = model.layers.iter().map(|layer| {
            let saved = SavedTensors::of(kind, device, layer.activation);
            let row = layer.saved_bytes(saved, value) + own_values * value;
            rows * row + context * layer.saved_key_value_bytes(saved, value) + attention * value
        });
        let (kept, largest) = (by_layer.clone().sum::<usize>(), by_layer.max().unwrap_or(0));
        let of_layers = if recomputes { model.layers.len() * rows * d * value + largest } else { kept };
        // Gradients of a layer are about half of its activations.
        let gradients = largest / 2;
        let inputs = (tokens * (decoder.taps.len() + 2) + supervised * 3) * d * value;
        of_layers
            + gradients
            + inputs
            + distill_loss::buffer_bytes(model.vocab_size, supervised, kind, device)
    }
}
