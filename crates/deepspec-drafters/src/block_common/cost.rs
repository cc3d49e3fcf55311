//! Rows and operations of the backbone.

use deepspec_models::nn::Heads;
use deepspec_ops::SavedTensors;

use super::{BlockSpec, eval_mask};
use crate::TrainSample;
use crate::draft_model::{DraftConfig, DraftDecoder, DrafterSettings, PassRows, SampleSize};

/// Rows of a pass over samples of these sizes. All drafted slots are taken as supervised.
pub fn block_pass_rows(decoder: &DraftDecoder, blocks: &BlockSpec, samples: &[SampleSize]) -> PassRows {
    let anchors: usize = samples.iter().map(|sample| sample.anchors).sum();
    let heads =
        decoder.model.layers.iter().map(|layer| layer.attention.heads.query).max().unwrap_or(0) as usize;
    let scores = |sample: &SampleSize| {
        SavedTensors::block_scores(sample.anchors * blocks.block_size, sample.tokens + blocks.block_size)
    };
    let tokens = samples.iter().map(|sample| sample.tokens).sum();
    PassRows {
        layers: anchors * blocks.block_size,
        tokens,
        context: tokens,
        supervised: anchors * blocks.drafted(),
        own_values: 0,
        attention: heads * samples.iter().map(scores).sum::<usize>(),
    }
}

/// Floating-point operations of forward and backward pass over `samples`: two per multiplication of the architecture's matrix products.
/// `heads` counts the products of the drafter's own heads for a sample from its numbers of blocks and supervised drafts. Masked
/// attention and recomputation do not count. Work that drafts share counts for each of them.
///
/// A trained product counts three times: itself, the gradient of its input and the gradient of its weight. A product with a constant input
/// or a frozen weight counts twice.
pub fn block_flops<S: DrafterSettings>(
    config: &DraftConfig<S>,
    samples: &[TrainSample],
    heads: impl Fn(f64, f64) -> f64,
) -> f64 {
    let Some(blocks) = config.settings.block_spec() else { return 0.0 };
    let of_sample = |sample: &TrainSample| {
        let supervised = |&anchor: &usize| eval_mask(&sample.loss_mask, anchor, blocks.drafted());
        let rows = sample.anchors.iter().map(supervised).sum::<usize>();
        2.0 * (backbone_products(&config.decoder, blocks, sample)
            + heads(sample.anchors.len() as f64, rows as f64))
    };
    samples.iter().filter(|sample| !sample.anchors.is_empty()).map(of_sample).sum()
}

/// Products of the backbone's forward and backward pass over a sample.
fn backbone_products(decoder: &DraftDecoder, blocks: &BlockSpec, sample: &TrainSample) -> f64 {
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
    products
}
