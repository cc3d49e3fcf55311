//! Rows and floating-point operations of a block drafter's training pass.

use deepspec_models::nn::Heads;
use deepspec_ops::SavedTensorSizes;

use super::{BlockSpec, supervised_draft_count};
use crate::TrainSample;
use crate::draft_model::{DraftConfig, DraftDecoder, DrafterSettings, PassRows, SampleSize};

/// Rows of a training pass over samples of these sizes. Assumes that every drafted slot is supervised.
pub fn block_pass_rows(decoder: &DraftDecoder, blocks: &BlockSpec, samples: &[SampleSize]) -> PassRows {
    let anchors: usize = samples.iter().map(|sample| sample.anchors).sum();
    let heads =
        decoder.model.layers.iter().map(|layer| layer.attention.heads.query).max().unwrap_or(0) as usize;
    let scores = |sample: &SampleSize| {
        SavedTensorSizes::block_score_count(
            sample.anchors * blocks.block_size,
            sample.tokens + blocks.block_size,
        )
    };
    let tokens = samples.iter().map(|sample| sample.tokens).sum();
    PassRows {
        layers: anchors * blocks.block_size,
        at_once: anchors * blocks.block_size,
        tokens,
        context: tokens,
        supervised: anchors * blocks.draft_len(),
        own_values: 0,
        head_values: 0,
        attention: heads * samples.iter().map(scores).sum::<usize>(),
    }
}

/// Multiplications per forward multiplication of a trained weight: forward, input gradient and weight gradient.
pub const TRAINED_FACTOR: f64 = 3.0;
/// Multiplications per forward multiplication of a frozen weight or a constant input: forward and one gradient.
pub const FROZEN_FACTOR: f64 = 2.0;

/// Floating-point operations of forward and backward pass over `samples`: two per multiplication of the architecture's matrix products.
/// `heads(blocks, supervised drafts)` counts the multiplications of a sample's heads. Masked attention and recomputation do not count.
/// Target logits count once per draft, even if drafts share a target state.
pub fn block_flops<S: DrafterSettings>(
    config: &DraftConfig<S>,
    samples: &[TrainSample],
    heads: impl Fn(f64, f64) -> f64,
) -> f64 {
    let Some(blocks) = config.settings.block_spec() else { return 0.0 };
    let sample_flops = |sample: &TrainSample| {
        let supervised =
            |&anchor: &usize| supervised_draft_count(&sample.loss_mask, anchor, blocks.draft_len());
        let rows = sample.anchors.iter().map(supervised).sum::<usize>();
        2.0 * (backbone_multiplications(&config.decoder, blocks, sample)
            + heads(sample.anchors.len() as f64, rows as f64))
    };
    samples.iter().filter(|sample| !sample.anchors.is_empty()).map(sample_flops).sum()
}

/// Multiplications of the backbone's forward and backward pass over a sample.
fn backbone_multiplications(decoder: &DraftDecoder, blocks: &BlockSpec, sample: &TrainSample) -> f64 {
    let (d, size, taps) = (decoder.model.hidden_size as f64, blocks.block_size, decoder.taps.len() as f64);
    let tokens = sample.input_ids.len() as f64;
    let slots = (sample.anchors.len() * size) as f64;
    // Each slot attends to the context before its anchor and to its own block.
    let seen: usize = sample.anchors.iter().map(|&anchor| size * (anchor + size)).sum();
    let mut multiplications = FROZEN_FACTOR * tokens * taps * d * d;
    for layer in &decoder.model.layers {
        let Heads { query, key_value, dim } = layer.attention.heads;
        let (queries, keys) = ((query * dim) as f64, (key_value * dim) as f64);
        let context = tokens * d * 2.0 * keys;
        let block = slots * d * (2.0 * queries + 2.0 * keys + 3.0 * layer.intermediate_size as f64);
        multiplications += TRAINED_FACTOR * (context + block + 2.0 * seen as f64 * queries);
    }
    multiplications
}
