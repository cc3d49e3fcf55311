//! What the backbone costs in arithmetic and in memory.

use deepspec_models::nn::Heads;
use tch::{Device, Kind};

use super::BlockSpec;
use super::attention::{ALIGNED, TILE, is_by_block};
use super::tiles::{COPIES, MOST_BYTES, SLOTS, most_rest};
use crate::TrainSample;
use crate::draft_model::{
    DIRECTIONS, DraftDecoder, OfAutograd, PROJECTIONS, PassBytes, SampleSize, family_norms, layer_shapes,
};

/// What the backward of one sequence's attention has at a time of the size of its queries, in float32, beside their slopes: the slopes of its output, and
/// in parts those of its queries by the blocks and by a part.
const QUERIES_AT_WORK: usize = 3;
/// The same where blocks go one by one.
const QUERIES_BY_BLOCK: usize = 1;
/// The same of the size of its keys and values, beside their slopes: those by part.
const KEYS_AT_WORK: usize = 2;
/// On CPUs, where blocks may go one by one: keys and values, each in panels of two kinds.
const PANELS_AT_WORK: usize = 4;
/// Keys and values.
const SIDES: usize = 2;
/// Score tensors of one tile that it has at a time where no fused kernel does without.
const SCORES_AT_WORK: usize = 3;
/// Bytes of a value in float32.
const FLOAT: usize = 4;

/// What forward and backward over `samples` hold at most beside the weights and their gradients, at `bytes` per value, but for the
/// losses.
///
/// Counted are the tensors that autograd keeps for the backward and, on top of them, what the backward of a layer's MLP works with,
/// or that of its attention, sequence by sequence, before which the layer's MLP is freed. Scores are never kept. `is_plain` says whether the first
/// layer projects what all masked slots have in common once.
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
    // A norm's output is kept where a product reads it.
    let of = OfAutograd::of(bytes, device);
    let norm = of.normed() + bytes;
    let mut kept = tokens * d * (taps * bytes + norm) + slots * d * (bytes + norm);
    let (mut layers, mut by_layer) = (0, vec![]);
    for (i, layer) in decoder.model.layers.iter().enumerate() {
        let Heads { query, key_value, dim } = layer.attention.heads;
        let (queries, keys) = ((query * dim) as usize, (key_value * dim) as usize);
        if decoder.model.layers[..i].iter().all(|other| other.attention != layer.attention) {
            // Of the context among the blocks of a tile, and of where windows end.
            let masked = |sample: &SampleSize| {
                let tiles = sample.anchors.div_ceil(TILE);
                sample.anchors.min(TILE) * (sample.tokens + tiles * ALIGNED).min(tiles * sample.tokens)
            };
            let sides = if layer.attention.window.is_some() { 2 } else { 1 };
            let rows = layer.attention.heads.repeats() as usize * size;
            kept += sides * samples.iter().map(masked).sum::<usize>() * rows * bytes;
        }
        // Queries are normed and rotated, and come out of the attention; keys are normed and rotated; values are themselves. In parts, queries that come out
        // are kept twice, folded and in order.
        let by_block = bytes == FLOAT && is_by_block(layer.attention.heads, Kind::Float, device);
        let folded = if by_block { 0 } else { queries * bytes };
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
                + slots * (folded + query as usize * FLOAT),
        );
        let at_work = |sample: &SampleSize| {
            let (slots, sources) = (sample.anchors * size, sample.tokens + sample.anchors * size);
            let scores = match device {
                Device::Cpu => 0,
                _ => SCORES_AT_WORK * sample.anchors.min(TILE) * size * query as usize * sample.tokens,
            };
            let of_keys = if device == Device::Cpu { PANELS_AT_WORK } else { KEYS_AT_WORK };
            let of_queries = if by_block { QUERIES_BY_BLOCK } else { QUERIES_AT_WORK };
            let in_parts = (of_queries * slots * queries + of_keys * sources * keys + scores) * FLOAT;
            let may_be_tiled = device != Device::Cpu && bytes < FLOAT && layer.attention.window.is_none();
            if may_be_tiled {
                in_parts.max(tiled_at_work(sample, size, queries, keys, bytes))
            } else {
                in_parts
            }
        };
        // Slopes of all sequences are there together.
        let sloped = |sample: &SampleSize| {
            let (slots, sources) = (sample.anchors * size, sample.tokens + sample.anchors * size);
            (slots * queries + SIDES * sources * keys) * FLOAT
        };
        let attention =
            samples.iter().map(sloped).sum::<usize>() + samples.iter().map(at_work).max().unwrap_or(0);
        layers = layers.max(of.mlp_at_work(layer.activation) * inner).max(attention.saturating_sub(mlp));
    }
    // The layer's output, its slope, their product and the slope of its input; the context's slope so far, and that by this layer.
    let between = (4 * slots + 2 * tokens) * d * bytes;
    PassBytes { kept, by_layer, input: slots * d * bytes, between, layers, ..PassBytes::default() }
}

/// What the backward of one sequence's attention in tiles has at a time on a GPU: copies of what tiles see, at most all of the context, and of what only some
/// blocks see, with their slopes; queries, their slopes by both parts, those of the output, and sums of the fused kernel in float32.
fn tiled_at_work(sample: &SampleSize, size: usize, queries: usize, keys: usize, bytes: usize) -> usize {
    const OF_QUERIES: usize = 4;
    let tiles = sample.anchors.div_ceil(SLOTS);
    let seen = (COPIES * tiles * sample.tokens * keys * bytes).min(MOST_BYTES);
    let rest = tiles * (most_rest(sample.anchors, sample.tokens) + SLOTS * size);
    seen + COPIES * rest * keys * bytes + tiles * SLOTS * size * queries * (OF_QUERIES * bytes + FLOAT)
}

/// Shapes of matrix products in passes over micro-batches of one size.
pub fn backbone_product_shapes(decoder: &DraftDecoder) -> usize {
    // Scores and outputs, by context and by block. Parts of the context are of more shapes, up to one per 64 tokens, of which only bfloat16
    // keeps code; what that takes was not measured.
    const ATTENTION: usize = 4;
    // The context is projected apart.
    let layer = DIRECTIONS * (PROJECTIONS + 1 + ATTENTION);
    // Queries and keys of the first layer, where they are computed once for all masked slots.
    const FIRST: usize = 2 * DIRECTIONS;
    // The taps need no gradient.
    2 + FIRST + layer_shapes(&decoder.model.layers) * layer
}

/// Floating-point operations of the backbone's forward and backward over a sample with anchors: two per multiplication in the matrix
/// products that the architecture asks for, masked attention not counted, nothing counted twice that is computed twice, and all that several drafts share
/// for each of them.
///
/// A trainable product counts three times (itself, the gradients of its input and of its weights), one whose input is constant or
/// whose weights are frozen twice.
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
