//! What a training pass of DSpark or DFlash costs in arithmetic and in memory.

use deepspec_ops::distill_loss;
use tch::Device;

use super::config::BlockConfig;
use super::recipe::MarkovKind;
use crate::TrainSample;
use crate::block_common::{backbone_flops, backbone_pass_bytes, backbone_product_shapes, eval_mask};
use crate::draft_model::{PassBytes, SampleSize};

impl BlockConfig {
    /// What forward and backward over `samples` hold at most beside the weights and their gradients, at `bytes` per value, if all drafts are supervised.
    pub fn pass_bytes(&self, samples: &[SampleSize], bytes: usize, device: Device) -> PassBytes {
        let rows = samples.iter().map(|sample| sample.anchors * self.blocks.drafted()).sum();
        let backbone = backbone_pass_bytes(&self.decoder, &self.blocks, true, samples, bytes, device);
        PassBytes { objective: self.objective_bytes(rows, bytes, device), ..backbone }
    }

    /// Shapes of matrix products in passes over micro-batches of one size.
    pub fn product_shapes(&self) -> usize {
        // Logits and their gradient, of chunks that are multiplied at one size; likewise the bias with that of its weight.
        let head = 2 + if self.markov.is_some() { 3 } else { 0 };
        backbone_product_shapes(&self.decoder) + head
    }

    /// What the losses over `rows` rows work with: a chunk's buffers, states and features of all rows with their gradients and the
    /// teacher's states, and float32 sums for a narrower W2.
    fn objective_bytes(&self, rows: usize, bytes: usize, device: Device) -> usize {
        let (d, vocab) = (self.decoder.model.hidden_size as usize, self.decoder.model.vocab_size);
        let rank = self.markov.map_or(0, |markov| markov.rank as usize);
        let sums = if bytes < size_of::<f32>() { vocab as usize * rank * size_of::<f32>() } else { 0 };
        let gamma = self.blocks.drafted() as i64;
        distill_loss::buffer_bytes(self.decoder.model.head_shape(), rank > 0, rows, gamma, bytes, device)
            + rows * (3 * d + 2 * rank) * bytes
            + sums
    }

    /// Floating-point operations of forward and backward over `samples`, counted as [`backbone_flops`] does; the teacher's logits
    /// count once. What drafts share counts for each of them.
    pub fn flops(&self, samples: &[TrainSample]) -> f64 {
        let (d, vocab) = (self.decoder.model.hidden_size as f64, self.decoder.model.vocab_size as f64);
        let gamma = self.blocks.drafted();
        let of_sample = |sample: &TrainSample| {
            let supervised = sample.anchors.iter().map(|&anchor| eval_mask(&sample.loss_mask, anchor, gamma));
            let rows = supervised.sum::<usize>() as f64;
            let mut products = (2.0 + 1.0) * rows * d * vocab;
            if let Some(markov) = self.markov {
                let (rank, slots) = (markov.rank as f64, (sample.anchors.len() * gamma) as f64);
                let gate = match markov.kind {
                    MarkovKind::Vanilla => 0.0,
                    MarkovKind::Gated => (d + rank) * rank,
                    MarkovKind::Rnn => (d + 2.0 * rank) * 3.0 * rank,
                };
                products += 3.0 * (rows * rank * vocab + slots * gate);
            }
            backbone_flops(&self.decoder, &self.blocks, sample) + 2.0 * products
        };
        samples.iter().filter(|sample| !sample.anchors.is_empty()).map(of_sample).sum()
    }
}
