//! What a training-time test costs in arithmetic and in memory.

use deepspec_models::nn::Heads;
use deepspec_ops::{AutogradMemory, distill_loss};
use tch::Device;

use super::batch::{PIECE, needed, supervised};
use super::config::Eagle3Config;
use super::recipe::Supervise;
use crate::TrainSample;
use crate::draft_model::{DIRECTIONS, PROJECTIONS, PassBytes, SampleSize, family_norms, layer_shapes};

impl Eagle3Config {
    /// Floating-point operations of forward and backward over `samples`, counted as for block drafters: two per multiplication in
    /// the matrix products of the columns that are computed and the rows that are supervised.
    pub fn flops(&self, samples: &[TrainSample], supervise: Supervise) -> f64 {
        let (d, vocab) = (self.decoder.model.hidden_size as f64, self.decoder.model.vocab_size as f64);
        let taps = self.decoder.taps.len() as f64;
        let mut products = 0.0;
        for sample in samples {
            for s in 0..self.ttt_length {
                let columns = needed(supervise, &sample.loss_mask, s, self.ttt_length);
                let is_supervised = |i: &&usize| supervised(supervise, &sample.loss_mask, **i, s);
                let rows = columns.iter().filter(is_supervised).count() as f64;
                // Column i sees i + 1 columns of step 0 and one of each later step.
                let seen: usize = columns.iter().map(|i| i + 1 + s).sum();
                let count = columns.len() as f64;
                if s == 0 {
                    products += 2.0 * count * taps * d * d;
                }
                for layer in &self.decoder.model.layers {
                    let Heads { query, key_value, dim } = layer.attention.heads;
                    let (queries, keys) = ((query * dim) as f64, (key_value * dim) as f64);
                    let inner = layer.intermediate_size as f64;
                    let projected = 2.0 * d * (queries + 2.0 * keys) + queries * d + 3.0 * d * inner;
                    products += 3.0 * (count * projected + 2.0 * seen as f64 * queries);
                }
                products += (2.0 + 1.0) * rows * d * vocab;
            }
        }
        2.0 * products
    }

    /// Shapes of matrix products in passes over micro-batches of one size: every step has columns of its own number.
    pub fn product_shapes(&self) -> usize {
        let steps = self.ttt_length * layer_shapes(&self.decoder.model.layers) * DIRECTIONS * PROJECTIONS;
        // The taps need no gradient; logits and theirs come in chunks of one size.
        2 + steps + 2
    }

    /// What forward and backward hold at most beside the weights and their gradients, at `bytes` per value.
    ///
    /// Steps after the first compute hardly more columns than are supervised.
    pub fn pass_bytes(&self, samples: &[SampleSize], bytes: usize, device: Device) -> PassBytes {
        let (d, steps) = (self.decoder.model.hidden_size as usize, self.ttt_length);
        let tokens: usize = samples.iter().map(|sample| sample.tokens).sum();
        let rows = steps * samples.iter().map(|sample| sample.supervised).sum::<usize>();
        let columns = |sample: &SampleSize, s: usize| if s == 0 { sample.tokens } else { sample.supervised };
        let all: usize = (0..steps).flat_map(|s| samples.iter().map(move |sample| columns(sample, s))).sum();
        let of = AutogradMemory::of(bytes, device);
        let norm = of.normed() + bytes;
        // The supervised rows of every step are picked out and normed.
        let mut kept = tokens * d * bytes * self.decoder.taps.len() + rows * d * norm;
        // They in another order, their gradients, and the teacher's states, which the steps share.
        let objective =
            distill_loss::buffer_bytes(self.decoder.model.head_shape(), false, rows, 1, bytes, device)
                + (2 * rows + rows.div_ceil(steps.max(1))) * d * bytes;
        let mut layers = 0;
        for layer in &self.decoder.model.layers {
            let Heads { query, key_value, dim } = layer.attention.heads;
            let (queries, keys) = ((query * dim) as usize, (key_value * dim) as usize);
            let inner = layer.intermediate_size as usize * bytes;
            // The token's embedding is frozen, of which the norm keeps one form; the state; both side by side; the residual before the MLP.
            kept += all * d * (size_of::<f32>() + of.normed() + 2 * bytes + norm);
            // Queries are normed and laid out for the attention, whose output is laid out once more.
            let head_norm = if layer.qk_norm { of.normed() } else { 0 };
            kept += all * (queries * (head_norm + 3 * bytes) + keys * (head_norm + 2 * bytes));
            kept += all * of.mlp(layer.activation) * inner;
            kept += family_norms(layer, all, all, of);
            // Each piece has keys, values and a mask of its own.
            for (s, sample) in (0..steps).flat_map(|s| samples.iter().map(move |sample| (s, sample))) {
                let count = columns(sample, s);
                let pieces = (0..count).step_by(PIECE).map(|first| {
                    let rows = PIECE.min(count - first);
                    let seen = (first + rows) * sample.tokens / count + s * rows;
                    seen * (2 * keys + rows * (query / key_value) as usize) * bytes
                });
                kept += pieces.sum::<usize>();
            }
            layers = layers.max(of.mlp_gradients(layer.activation) * inner * tokens);
        }
        PassBytes { kept, layers, objective, ..PassBytes::default() }
    }
}
