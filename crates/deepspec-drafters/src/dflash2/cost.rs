//! What a training pass of DFlash 2 costs in arithmetic and in memory.

use deepspec_ops::distill_loss;
use tch::Device;

use super::config::DFlash2Config;
use crate::TrainSample;
use crate::block_common::{backbone_flops, backbone_pass_bytes, backbone_product_shapes, eval_mask};
use crate::draft_model::{DIRECTIONS, PassBytes, SampleSize};

/// Halves of a layer, each with a convolution before it and one behind it.
const HALVES: usize = 2;
/// Convolutions of a half.
const SIDES: usize = 2;

impl DFlash2Config {
    /// Outputs of a half's projection to coefficients.
    fn coefficients(&self) -> usize {
        let channels = self.decoder.model.hidden_size / self.convolution.group_size;
        (SIDES as i64 * self.convolution.kernel_size * channels) as usize
    }

    /// What forward and backward over `samples` hold at most beside the weights and their gradients, at `bytes` per value.
    pub fn pass_bytes(&self, samples: &[SampleSize], bytes: usize, device: Device) -> PassBytes {
        let (model, rank) = (&self.decoder.model, self.selector_rank as usize);
        let (d, vocab) = (model.hidden_size as usize, model.vocab_size);
        let gamma = self.blocks.drafted();
        let anchors: usize = samples.iter().map(|sample| sample.anchors).sum();
        let (slots, rows) = (anchors * self.blocks.block_size, anchors * gamma);
        let mut backbone = backbone_pass_bytes(&self.decoder, &self.blocks, false, samples, bytes, device);
        // Autograd keeps what each convolution reads, once per tap: as it is, and moved by some slots.
        let read = SIDES * self.convolution.kernel_size as usize * d;
        let convolved = HALVES * slots * (read + self.coefficients()) * bytes;
        backbone.by_layer.iter_mut().for_each(|layer| *layer += convolved);
        // The candidates' rows of B as they are, in float32, and as gradients.
        let tile = distill_loss::tile_rows(vocab, rows, gamma as i64, device);
        let candidates = tile * self.selector_top_k as usize * rank * (bytes + 2 * size_of::<f32>());
        let objective =
            distill_loss::buffer_bytes(model.head_shape(), false, rows, gamma as i64, bytes, device)
                + candidates
                + rows * (3 * d + 3 * rank) * bytes
                + vocab as usize * rank * size_of::<f32>();
        PassBytes { objective, ..backbone }
    }

    /// Shapes of matrix products in passes over micro-batches of one size.
    pub fn product_shapes(&self) -> usize {
        // Both halves' coefficients have one shape; then the selector's projection, and logits with their gradient.
        backbone_product_shapes(&self.decoder) + 2 * DIRECTIONS + 2
    }

    /// Floating-point operations of forward and backward over `samples`, counted as [`backbone_flops`] does.
    pub fn flops(&self, samples: &[TrainSample]) -> f64 {
        let (model, rank) = (&self.decoder.model, self.selector_rank as f64);
        let (d, vocab, gamma) = (model.hidden_size as f64, model.vocab_size as f64, self.blocks.drafted());
        let coefficients = (HALVES * model.layers.len() * self.coefficients()) as f64;
        let of_sample = |sample: &TrainSample| {
            let supervised = sample.anchors.iter().map(|&anchor| eval_mask(&sample.loss_mask, anchor, gamma));
            let rows = supervised.sum::<usize>() as f64;
            let slots = (sample.anchors.len() * self.blocks.block_size) as f64;
            let drafts = (sample.anchors.len() * gamma) as f64;
            let pairs = rows * self.selector_top_k as f64 * rank;
            let products = rows * d * vocab + slots * d * coefficients + drafts * d * rank + pairs;
            backbone_flops(&self.decoder, &self.blocks, sample) + 2.0 * 3.0 * products
        };
        samples.iter().filter(|sample| !sample.anchors.is_empty()).map(of_sample).sum()
    }
}
