//! Estimates the memory of a training pass from its number of rows.

use deepspec_ops::{SavedTensorSizes, distill_loss};
use tch::{Device, Kind};

use super::DraftDecoder;

/// Sizes of one sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleSize {
    /// Number of tokens, T.
    pub tokens: usize,
    /// Number of supervised tokens.
    pub supervised: usize,
    /// Number of anchors that the plan of the drafter chooses; see [`DrafterPlan::choose_anchors`](crate::DrafterPlan::choose_anchors).
    pub anchors: usize,
}

/// Row counts of a training pass over a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassRows {
    /// Rows that run through the layers.
    pub layers: usize,
    /// Most of these rows that go through a layer at once; fewer than all if the pass has steps.
    pub at_once: usize,
    /// Tokens whose captured states the pass reads.
    pub tokens: usize,
    /// Context tokens whose keys and values every layer projects.
    pub context: usize,
    /// Rows with a loss.
    pub supervised: usize,
    /// Values per row and layer that autograd saves for modules that only this kind of drafter has.
    pub own_values: usize,
    /// Values of the whole pass that autograd saves for large heads, and gradients that their losses return.
    pub head_values: usize,
    /// Values per layer that attention saves in addition to queries, keys, values and output.
    pub attention: usize,
}

impl PassRows {
    /// Estimated peak bytes of forward and backward pass, without weights and gradients of parameters.
    ///
    /// Counts the tensors that autograd saves, the gradients of one layer's activations and the buffers of the losses. Of the heads it
    /// counts `head_values`.
    pub fn activation_bytes(
        &self,
        decoder: &DraftDecoder,
        vocab_size: i64,
        kind: Kind,
        device: Device,
        recomputes: bool,
    ) -> usize {
        let Self { layers: rows, at_once, tokens, context, supervised, own_values, head_values, attention } =
            *self;
        let (model, value) = (&decoder.model, kind.elt_size_in_bytes());
        let d = model.hidden_size as usize;
        let by_layer = model.layers.iter().map(|layer| {
            let saved = SavedTensorSizes::new(kind, device, layer.activation);
            let row = layer.saved_bytes(saved, value) + own_values * value;
            rows * row + context * layer.saved_key_value_bytes(saved, value) + attention * value
        });
        let (kept, largest) = (by_layer.clone().sum::<usize>(), by_layer.max().unwrap_or(0));
        let of_layers = if recomputes { model.layers.len() * rows * d * value + largest } else { kept };
        // Gradients of a layer's activations take about half of the activations' memory, step by step.
        let gradients = largest / 2 * at_once / rows.max(1);
        let inputs = (tokens * (decoder.taps.len() + 2) + supervised * 3) * d * value;
        of_layers
            + head_values * value
            + gradients
            + inputs
            + distill_loss::buffer_bytes(vocab_size, supervised, kind, device)
    }
}
