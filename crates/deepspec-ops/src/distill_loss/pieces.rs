//! Logits some tokens of the vocabulary at a time, and how buffers for them lie.

use tch::{Device, Kind, Tensor};

/// Some consecutive tokens of the vocabulary: columns of logits, and rows of weights.
pub(super) struct TokenRange {
    first: i64,
    count: i64,
}

impl TokenRange {
    /// All of `vocab` in pieces of at most `most`.
    pub fn pieces(vocab: i64, most: i64) -> impl Iterator<Item = Self> {
        (0..vocab).step_by(most as usize).map(move |first| Self { first, count: most.min(vocab - first) })
    }

    /// Their logits, of `[n, V]`.
    pub fn of_logits(&self, logits: &Tensor) -> Tensor {
        logits.narrow(1, self.first, self.count)
    }

    /// Their rows of a weight `[V, ..]`.
    pub fn of_weight(&self, weight: &Tensor) -> Tensor {
        weight.narrow(0, self.first, self.count)
    }

    /// Whether no others come before them.
    pub fn is_first(&self) -> bool {
        self.first == 0
    }

    /// How many they are.
    pub fn count(&self) -> i64 {
        self.count
    }
}

/// Bytes of a page of memory, and values of a line of the caches.
const PAGE: i64 = 4096;
const LINE: i64 = 16;

/// Values from one row of a buffer to the next, where rows are of `width`: whole pages apart, rows that are worked at side by side would share few
/// places of the nearest cache.
pub(super) fn pitch(width: i64) -> i64 {
    if width * size_of::<f32>() as i64 % PAGE == 0 { width + LINE } else { width }
}

/// A buffer of the CPU for float32 rows, a [`pitch`] apart: `[rows, width]`.
pub(super) fn spaced(rows: i64, width: i64) -> Tensor {
    Tensor::empty([rows, pitch(width)], (Kind::Float, Device::Cpu)).narrow(1, 0, width)
}
