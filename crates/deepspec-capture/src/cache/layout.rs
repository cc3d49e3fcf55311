//! Shape of a cache's rows: taps, hidden size, encoding, and which final hidden states are stored.

use std::fmt;

use serde::{Deserialize, Serialize};

use deepspec_core::{FinalStates, Tap};

/// How a hidden state is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// bfloat16, as captured; two little-endian bytes per value.
    Bf16,
    /// Lossless compression of bfloat16: one byte of sign and mantissa per value, and each sample's
    /// exponents compressed by zstd.
    Bf16z,
    /// e4m3, one byte per value, with one bfloat16 scale per tap of a token and per final state.
    Fp8,
}

impl Encoding {
    /// All encodings.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::Bf16z, Self::Fp8];

    /// Bytes of one value in `taps` and `last`.
    pub fn value_bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::Bf16z | Self::Fp8 => 1,
        }
    }

    /// Whether the encoding compresses, so that the size of a cache depends on its values.
    pub fn compresses(self) -> bool {
        self == Self::Bf16z
    }

    /// Whether the encoding is lossy.
    pub fn is_lossy(self) -> bool {
        self == Self::Fp8
    }

    /// Bytes of the scale of one state.
    pub(crate) fn scale_bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::Bf16z => 0,
            Self::Fp8 => 2,
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bf16 => f.write_str("bf16"),
            Self::Bf16z => f.write_str("bf16z"),
            Self::Fp8 => f.write_str("fp8"),
        }
    }
}

/// Marks supervised tokens: `true` inside the half-open `spans`. Span parts beyond `length` are
/// ignored.
pub fn loss_mask(length: u32, spans: &[(u32, u32)]) -> Vec<bool> {
    let mut mask = vec![false; length as usize];
    for &(start, end) in spans {
        if let Some(span) = mask.get_mut(start as usize..end.min(length) as usize) {
            span.fill(true);
        }
    }
    mask
}

/// The shape of every row of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The m captured layers, in the order of concatenation.
    pub taps: Vec<Tap>,
    /// Values per hidden state, d.
    pub hidden_size: usize,
    /// Which positions have their final hidden state stored.
    pub last: FinalStates,
    /// Encoding of values.
    pub encoding: Encoding,
}

impl Layout {
    /// Bytes of one token's taps: m·d values, and 0 without taps. `None` if d is 0 or this exceeds 64 bits.
    pub(crate) fn tap_row_bytes(&self) -> Option<u64> {
        let taps = u64::try_from(self.taps.len()).ok()?;
        self.last_row_bytes()?.checked_mul(taps)
    }

    /// Bytes of one final hidden state: d values. `None` if that is zero or exceeds 64 bits.
    pub(crate) fn last_row_bytes(&self) -> Option<u64> {
        let values = u64::try_from(self.hidden_size).ok()?;
        values.checked_mul(self.encoding.value_bytes() as u64).filter(|&bytes| bytes > 0)
    }

    /// Bytes of the scales of one token's taps.
    pub(crate) fn tap_scales_bytes(&self) -> u64 {
        (self.taps.len() * self.encoding.scale_bytes()) as u64
    }

    /// Bytes of the scale of one final hidden state.
    pub(crate) fn last_scale_bytes(&self) -> u64 {
        self.encoding.scale_bytes() as u64
    }

    /// Bytes of a sample with `rows` tokens and `last_rows` final states, including scales but not
    /// compressed exponents.
    pub(crate) fn sample_bytes(&self, rows: u64, last_rows: u64) -> Option<u64> {
        let tap_row = self.tap_row_bytes()?.checked_add(self.tap_scales_bytes())?;
        let last_row = self.last_row_bytes()?.checked_add(self.last_scale_bytes())?;
        tap_row.checked_mul(rows)?.checked_add(last_row.checked_mul(last_rows)?)
    }

    /// Bytes that a plan reserves for a sample with `rows` tokens and `last_rows` final states. For
    /// a compressing encoding this is the uncompressed size.
    pub(crate) fn planned_bytes(&self, rows: u64, last_rows: u64) -> Option<u64> {
        if self.encoding.compresses() {
            return self.as_bfloat16().sample_bytes(rows, last_rows);
        }
        self.sample_bytes(rows, last_rows)
    }

    /// This layout with the encoding bfloat16, which is the dtype of captured states and of
    /// training.
    pub(crate) fn as_bfloat16(&self) -> Self {
        Self { encoding: Encoding::Bf16, ..self.clone() }
    }
}
