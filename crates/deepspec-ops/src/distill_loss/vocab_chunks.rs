//! Vocabulary ranges, and the layout of logit buffers.

use tch::{Device, Kind, Tensor};

/// A vocabulary range: columns of logits, and rows of weights.
pub(super) struct VocabChunk {
    first: i64,
    count: i64,
}

impl VocabChunk {
    /// Splits `vocab` tokens into ranges of at most `most` tokens.
    pub fn split_vocab(vocab: i64, most: i64) -> impl Iterator<Item = Self> {
        (0..vocab).step_by(most as usize).map(move |first| Self { first, count: most.min(vocab - first) })
    }

    /// View of the range's columns of `logits [n, V]`.
    pub fn slice_logits(&self, logits: &Tensor) -> Tensor {
        logits.narrow(1, self.first, self.count)
    }

    /// View of the range's rows of `weight [V, ..]`.
    pub fn slice_weight(&self, weight: &Tensor) -> Tensor {
        weight.narrow(0, self.first, self.count)
    }

    /// Whether the range starts at token 0.
    pub fn is_first(&self) -> bool {
        self.first == 0
    }

    /// Number of tokens.
    pub fn count(&self) -> i64 {
        self.count
    }
}

/// Bytes of a memory page.
const PAGE_BYTES: i64 = 4096;
/// Float32 values of a cache line.
const CACHE_LINE_FLOATS: i64 = 16;

/// Row stride of a buffer. Rows whose stride is a multiple of the page size would map to the same few sets of the L1
/// cache.
pub(super) fn padded_row_stride(width: i64) -> i64 {
    if width * size_of::<f32>() as i64 % PAGE_BYTES == 0 { width + CACHE_LINE_FLOATS } else { width }
}

/// A float32 buffer `[rows, width]` on the CPU with stride [`padded_row_stride`].
pub(super) fn padded_buffer(rows: i64, width: i64) -> Tensor {
    Tensor::empty([rows, padded_row_stride(width)], (Kind::Float, Device::Cpu)).narrow(1, 0, width)
}
