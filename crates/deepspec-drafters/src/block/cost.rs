//! What a training pass of a block drafter costs in arithmetic and in memory.

use deepspec_models::nn::Heads;
use tch::Device;

use super::batch::eval_mask;
use super::config::BlockConfig;
use super::recipe::MarkovKind;
use crate::trained::{
    DIRECTIONS, MLP, MLP_AT_WORK, NORMED, PROJECTIONS, PassBytes, SampleSize, family_norms, layer_shapes,
};
use crate::{TrainSample, losses};

/// Score tensors that the backward of one sequence's attention has at a time beside the kept weights.
const SCORES_AT_WORK: usize = 3;

impl BlockConfig {
    /// What forward and backward over `samples` hold at most beside the weights and their gradients, at `bytes` per value.
    ///
    /// Counted are the tensors that autograd keeps for the backward and, on top of them, what the losses work with, or the backward of
    /// a layer's MLP, or that of its attention to one sequence, before which the layer's MLP is freed.
    pub fn pass_bytes(&self, samples: &[SampleSize], bytes: usize, device: Device) -> PassBytes {
        let (d, gamma) = (self.model.hidden_size as usize, self.block_size);
        let taps = self.target_layer_ids.len();
        let tokens: usize = samples.iter().map(|sample| sample.tokens).sum();
        let slots: usize = samples.iter().map(|sample| sample.anchors * gamma).sum();
        // A norm's output is kept where a product reads it.
        let norm = NORMED + bytes;
        let masks: usize = samples.iter().map(|sample| sample.anchors * sample.tokens * bytes).sum();
        let mut kept = masks + tokens * d * (taps * bytes + norm) + slots * d * (bytes + norm);
        let mut layers = 0;
        for layer in &self.model.layers {
            let Heads { query, key_value, dim } = layer.attention.heads;
            let (queries, keys) = ((query * dim) as usize, (key_value * dim) as usize);
            // Queries are normed, scaled, and come out of the attention; keys are normed and rotated; values are themselves.
            let head_norm = if layer.qk_norm { NORMED } else { 0 };
            let projected = |width: usize| width * (head_norm + 2 * bytes);
            kept += slots * (2 * d * norm + projected(queries) + projected(keys));
            let inner = slots * layer.intermediate_size as usize * bytes;
            kept += MLP * inner + tokens * projected(keys);
            kept += family_norms(layer, slots, slots + tokens);
            let scores = |sample: &SampleSize| {
                query as usize * sample.anchors * gamma * (sample.tokens + 2 * gamma) * bytes
            };
            kept += samples.iter().map(scores).sum::<usize>();
            let attention = SCORES_AT_WORK * samples.iter().map(scores).max().unwrap_or(0);
            layers = layers.max(MLP_AT_WORK * inner).max(attention.saturating_sub(MLP * inner));
        }
        PassBytes { kept, layers, objective: self.objective_bytes(slots, bytes, device) }
    }

    /// Shapes of matrix products in passes over micro-batches of one size.
    pub fn product_shapes(&self) -> usize {
        // Scores and outputs, by context and by block.
        const ATTENTION: usize = 4;
        // The context is projected apart.
        let layer = DIRECTIONS * (PROJECTIONS + 1 + ATTENTION);
        // Logits and their gradient, of whole chunks and of the last; likewise the bias with that of its weight.
        let head = 2 * (2 + if self.markov.is_some() { 3 } else { 0 });
        // The taps need no gradient.
        2 + layer_shapes(&self.model.layers) * layer + head
    }

    /// What the losses over `rows` rows work with: a chunk's buffers, states and features of all rows with their gradients and the
    /// teacher's states, and float32 sums for a narrower W2.
    fn objective_bytes(&self, rows: usize, bytes: usize, device: Device) -> usize {
        let (d, vocab) = (self.model.hidden_size as usize, self.model.vocab_size);
        let rank = self.markov.map_or(0, |markov| markov.rank as usize);
        let sums = if bytes < size_of::<f32>() { vocab as usize * rank * size_of::<f32>() } else { 0 };
        losses::buffer_bytes(vocab, rows, self.block_size as i64, self.markov.is_some(), bytes, device)
            + rows * (3 * d + 2 * rank) * bytes
            + sums
    }

    /// Floating-point operations of forward and backward over `samples`: two per multiplication in the matrix products that the
    /// architecture asks for, masked attention not counted, nothing counted twice that is computed twice.
    ///
    /// A trainable product counts three times (itself, the gradients of its input and of its weights), one whose input is constant
    /// or whose weights are frozen twice, the teacher's logits once.
    pub fn flops(&self, samples: &[TrainSample]) -> f64 {
        let (d, vocab) = (self.model.hidden_size as f64, self.model.vocab_size as f64);
        let (gamma, taps) = (self.block_size, self.target_layer_ids.len() as f64);
        let mut products = 0.0;
        for sample in samples.iter().filter(|sample| !sample.anchors.is_empty()) {
            let tokens = sample.input_ids.len() as f64;
            let slots = (sample.anchors.len() * gamma) as f64;
            let supervised: usize =
                sample.anchors.iter().map(|&anchor| eval_mask(&sample.loss_mask, anchor, gamma)).sum();
            let rows = supervised as f64;
            // Each slot sees the context before its anchor and its own block.
            let seen: usize = sample.anchors.iter().map(|&anchor| gamma * (anchor + gamma)).sum();
            products += 2.0 * tokens * taps * d * d;
            for layer in &self.model.layers {
                let Heads { query, key_value, dim } = layer.attention.heads;
                let (queries, keys) = ((query * dim) as f64, (key_value * dim) as f64);
                let context = tokens * d * 2.0 * keys;
                let block = slots * d * (2.0 * queries + 2.0 * keys + 3.0 * layer.intermediate_size as f64);
                products += 3.0 * (context + block + 2.0 * seen as f64 * queries);
            }
            products += (2.0 + 1.0) * rows * d * vocab;
            if let Some(markov) = self.markov {
                let rank = markov.rank as f64;
                let gate = match markov.kind {
                    MarkovKind::Vanilla => 0.0,
                    MarkovKind::Gated => (d + rank) * rank,
                    MarkovKind::Rnn => (d + 2.0 * rank) * 3.0 * rank,
                };
                products += 3.0 * (rows * rank * vocab + slots * gate);
            }
        }
        2.0 * products
    }
}
