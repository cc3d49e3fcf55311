//! What a training-time test costs in arithmetic and in memory.

use deepspec_core::recipe::Supervise;

use super::batch::{PIECE, needed, supervised};
use super::config::Eagle3Config;
use super::objective::CHUNK;
use crate::drafters::block::TrainSample;
use crate::drafters::cost::{NORMED, PassBytes, SampleSize};
use crate::nn::Heads;

/// Values of the MLP's insides that autograd keeps: gate, its activation, up, and their product.
const MLP: usize = 4;
/// Float32 tensors of a chunk's logits that the losses have at a time.
const LOGITS: usize = 6;

impl Eagle3Config {
    /// Floating-point operations of forward and backward over `samples`, counted as for block drafters: two per multiplication in
    /// the matrix products of the columns that are computed and the rows that are supervised.
    pub fn flops(&self, samples: &[TrainSample], supervise: Supervise) -> f64 {
        let (d, vocab) = (self.model.hidden_size as f64, self.model.vocab_size as f64);
        let taps = self.target_layer_ids.len() as f64;
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
                for layer in &self.model.layers {
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

    /// What forward and backward hold at most beside the weights and their gradients, at `bytes` per value, if every column of
    /// every step is supervised.
    pub fn pass_bytes(&self, samples: &[SampleSize], bytes: usize) -> PassBytes {
        let (d, vocab) = (self.model.hidden_size as usize, self.model.vocab_size as usize);
        let tokens: usize = samples.iter().map(|sample| sample.tokens).sum();
        let norm = NORMED + bytes;
        let mut kept = tokens * d * bytes * (self.target_layer_ids.len() + 1);
        for layer in &self.model.layers {
            let Heads { query, key_value, dim } = layer.attention.heads;
            let (queries, keys) = ((query * dim) as usize, (key_value * dim) as usize);
            for s in 0..self.ttt_length {
                // Norms of token, state and residual, the pair of the first two, and the final norm.
                kept += tokens * d * (4 * norm + 2 * bytes);
                kept += tokens * (queries + keys) * (NORMED + 2 * bytes);
                kept += tokens * MLP * layer.intermediate_size as usize * bytes;
                // Each piece has keys, values and a mask of its own.
                for sample in samples {
                    let pieces = (0..sample.tokens).step_by(PIECE).map(|first| {
                        let rows = PIECE.min(sample.tokens - first);
                        let seen = first + rows + s * rows;
                        seen * (2 * keys + rows * (query / key_value) as usize) * bytes
                    });
                    kept += pieces.sum::<usize>();
                }
            }
        }
        let gradients = tokens * self.ttt_length * d * 2 * bytes;
        let objective = gradients + LOGITS * CHUNK as usize * vocab * size_of::<f32>();
        PassBytes { kept, attention: 0, objective }
    }
}
