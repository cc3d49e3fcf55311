//! What a training pass of a block drafter costs in arithmetic and in memory.

use deepspec_core::recipe::MarkovKind;

use super::batch::{TrainSample, eval_mask};
use super::config::BlockConfig;
use crate::drafters::cost::{PassBytes, SampleSize};
use crate::nn::Heads;

/// Tensors that autograd keeps, in widths of their rows: of a norm (its input, its input normed, its output), of the queries, of keys
/// and values, of the MLP's insides, and of the attention scores.
const NORM: usize = 3;
const QUERIES: usize = 4;
const KEYS: usize = 5;
const MLP: usize = 4;
const KEPT_SCORES: usize = 2;
/// Score tensors that the backward of one sequence's attention has at a time on top.
const SCORES_AT_WORK: usize = 4;
/// Tensors of all rows' logits that the losses have at a time.
const LOGITS: usize = 8;

impl BlockConfig {
    /// What forward and backward over `samples` hold at most beside the weights and their gradients, at `bytes` per value.
    ///
    /// Counted are the tensors that autograd keeps for the backward and, on top of them, the larger of what the losses and what the
    /// attention of one sequence work with. P slots, T tokens.
    pub fn pass_bytes(&self, samples: &[SampleSize], bytes: usize) -> PassBytes {
        let (d, gamma) = (self.model.hidden_size as usize, self.block_size);
        let taps = self.target_layer_ids.len();
        let tokens: usize = samples.iter().map(|sample| sample.tokens).sum();
        let slots: usize = samples.iter().map(|sample| sample.anchors * gamma).sum();
        // The tapped states, what `fc` makes of them, and its norm; tokens, residual and final norm of the slots.
        let mut kept = bytes * (tokens * (taps * d + NORM * d) + slots * (NORM + 1) * d);
        let mut attention = 0;
        for layer in &self.model.layers {
            let Heads { query, key_value, dim } = layer.attention.heads;
            let (queries, keys) = ((query * dim) as usize, (key_value * dim) as usize);
            let inner = layer.intermediate_size as usize;
            let scores =
                |sample: &SampleSize| query as usize * sample.anchors * gamma * (sample.tokens + gamma) * bytes;
            kept += bytes * slots * (2 * NORM * d + QUERIES * queries + KEYS * keys + MLP * inner);
            kept += bytes * tokens * KEYS * keys;
            kept += KEPT_SCORES * samples.iter().map(scores).sum::<usize>();
            attention = attention.max(SCORES_AT_WORK * samples.iter().map(scores).max().unwrap_or(0));
        }
        kept += samples.iter().map(|sample| sample.anchors * sample.tokens * bytes).sum::<usize>(); // masks
        PassBytes { kept, attention, objective: self.objective_bytes(slots) }
    }

    /// What the losses hold for all `rows` at once: float32 tensors over the vocabulary.
    fn objective_bytes(&self, rows: usize) -> usize {
        LOGITS * rows * self.model.vocab_size as usize * size_of::<f32>()
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
