//! Operations and memory of the backbone.

use deepspec_models::nn::Heads;
use deepspec_ops::{AutogradMemory, BlockSizes};
use tch::Device;

use super::BlockSpec;
use crate::TrainSample;
use crate::draft_model::{
    DIRECTIONS, DraftDecoder, PROJECTIONS, PassBytes, SampleSize, family_norms, layer_shapes,
};

/// Peak bytes of forward and backward pass over `samples`, beside weights, gradients and losses, at `bytes` per value.
///
/// The sum has the tensors that autograd keeps, and the temporaries of the backward pass of a layer's MLP or of its attention, whichever
/// are more. Scores are never kept. `is_plain` says whether the first layer projects mask tokens once.
pub fn backbone_pass_bytes(
    decoder: &DraftDecoder,
    blocks: &BlockSpec,
    is_plain: bool,
    samples: &[SampleSize],
    bytes: usize,
    device: Device,
) -> PassBytes {
    let (d, size, taps) = (decoder.model.hidden_size as usize, blocks.block_size, decoder.taps.len());
    let tokens: usize = samples.iter().map(|sample| sample.tokens).sum();
    let anchors: usize = samples.iter().map(|sample| sample.anchors).sum();
    let slots = anchors * size;
    let sequences: Vec<BlockSizes> =
        samples.iter().map(|sample| BlockSizes { tokens: sample.tokens, blocks: sample.anchors }).collect();
    // A norm's output is kept where a product reads it.
    let of = AutogradMemory::of(bytes, device);
    let norm = of.normed() + bytes;
    let mut kept = tokens * d * (taps * bytes + norm) + slots * d * (bytes + norm);
    let (mut layers, mut by_layer) = (0, vec![]);
    for (i, layer) in decoder.model.layers.iter().enumerate() {
        let Heads { query, key_value, dim } = layer.attention.heads;
        let (queries, keys) = ((query * dim) as usize, (key_value * dim) as usize);
        let attention = &layer.attention;
        if decoder.model.layers[..i].iter().all(|other| other.attention != *attention) {
            kept += BlockSizes::mask_bytes(&sequences, attention, size, bytes);
        }
        // Kept are queries before and after the rotation, keys likewise, values, and the output.
        let head_norm = if layer.qk_norm { of.normed() } else { 0 };
        let projected = |width: usize| width * (head_norm + 2 * bytes);
        let distinct = if i == 0 && is_plain { anchors + 1 } else { slots };
        let inner = slots * layer.intermediate_size as usize * bytes;
        let mlp = of.mlp(layer.activation) * inner;
        by_layer.push(
            (distinct + slots) * d * norm
                + (queries + keys) * (distinct * head_norm + slots * 2 * bytes)
                + mlp
                + tokens * projected(keys)
                + family_norms(layer, slots, slots + tokens, of)
                + BlockSizes::kept_bytes(slots, attention.heads, bytes, device),
        );
        let backward = BlockSizes::backward_bytes(&sequences, attention, size, bytes, device);
        layers = layers.max(of.mlp_gradients(layer.activation) * inner).max(backward.saturating_sub(mlp));
    }
    // The layer's output, its gradient, their product, the input's gradient; the context's gradient so far and this layer's share.
    let between = (4 * slots + 2 * tokens) * d * bytes;
    PassBytes { kept, by_layer, input: slots * d * bytes, between, layers, ..PassBytes::default() }
}

/// Shapes of matrix products in passes over micro-batches of one size.
pub fn backbone_product_shapes(decoder: &DraftDecoder) -> usize {
    // Scores and outputs, by context and by block. Parts of the context have up to one more shape per 64 tokens; their code was not
    // measured.
    const ATTENTION: usize = 4;
    // The context has a projection of its own.
    let layer = DIRECTIONS * (PROJECTIONS + 1 + ATTENTION);
    // Queries and keys of the first layer, which projects mask tokens once.
    const FIRST: usize = 2 * DIRECTIONS;
    // Captured hidden states need no gradient.
    2 + FIRST + layer_shapes(&decoder.model.layers) * layer
}

/// Floating-point operations of the backbone's forward and backward pass over a sample: two per multiplication of the architecture's
/// matrix products. Masked attention and recomputation do not count; work that drafts share counts for each of them.
///
/// A trained product counts three times: itself, the gradient of its input and the gradient of its weight. A product with a constant input
/// or a frozen weight counts twice.
pub fn backbone_flops(decoder: &DraftDecoder, blocks: &BlockSpec, sample: &TrainSample) -> f64 {
    let (d, size, taps) = (decoder.model.hidden_size as f64, blocks.block_size, decoder.taps.len() as f64);
    let tokens = sample.input_ids.len() as f64;
    let slots = (sample.anchors.len() * size) as f64;
    // Each slot sees the context before its anchor and its own block.
    let seen: usize = sample.anchors.iter().map(|&anchor| size * (anchor + size)).sum();
    let mut products = 2.0 * tokens * taps * d * d;
    for layer in &decoder.model.layers {
        let Heads { query, key_value, dim } = layer.attention.heads;
        let (queries, keys) = ((query * dim) as f64, (key_value * dim) as f64);
        let context = tokens * d * 2.0 * keys;
        let block = slots * d * (2.0 * queries + 2.0 * keys + 3.0 * layer.intermediate_size as f64);
        products += 3.0 * (context + block + 2.0 * seen as f64 * queries);
    }
    2.0 * products
}
