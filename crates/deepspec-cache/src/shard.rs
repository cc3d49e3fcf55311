//! The shape of a shard file: a safetensors header of known size, then `taps`, then `last`.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::error::CacheError;
use crate::layout::{Encoding, Layout};

/// The data starts at a multiple of this, so that rows keep the alignment that their size gives them.
const ALIGNMENT: usize = 64;

/// `shard-00012.safetensors`.
pub(crate) fn file_name(shard: usize) -> String {
    format!("shard-{shard:05}.safetensors")
}

/// Whether a file name is one of [`file_name`]'s.
pub(crate) fn is_file_name(name: &str) -> bool {
    let number = name.strip_prefix("shard-").and_then(|rest| rest.strip_suffix(".safetensors"));
    number.is_some_and(|number| number.len() >= 5 && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The shard's path in `dir`.
pub(crate) fn path(dir: &Path, shard: usize) -> PathBuf {
    dir.join(file_name(shard))
}

/// Where everything lies in a shard file. N rows of m·d values, then M rows of d values.
#[derive(Debug)]
pub(crate) struct Geometry {
    header: Vec<u8>,
    tap_row: u64,
    last_row: u64,
    last_start: u64,
    bytes: u64,
}

impl Geometry {
    /// The geometry of a shard with `rows` tokens, `last_rows` of which keep their last state.
    ///
    /// # Errors
    /// When there are no values, or more bytes than 64 bits count.
    pub fn new(layout: &Layout, rows: u64, last_rows: u64) -> Result<Self, CacheError> {
        let bad = || CacheError::BadLayout { taps: layout.taps.len(), hidden_size: layout.hidden_size, rows };
        let (tap_row, last_row) = layout.tap_row_bytes().zip(layout.last_row_bytes()).ok_or_else(bad)?;
        let taps = tap_row.checked_mul(rows).filter(|&bytes| bytes > 0).ok_or_else(bad)?;
        let data = layout.sample_bytes(rows, last_rows).ok_or_else(bad)?;
        let header = header(layout, [rows, last_rows], [taps, data]);
        let bytes = data.checked_add(header.len() as u64).ok_or_else(bad)?;
        let last_start = header.len() as u64 + taps;
        Ok(Self { header, tap_row, last_row, last_start, bytes })
    }

    /// The file's first bytes, up to the data.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Size of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// File bytes of the taps of `rows` tokens from `first` on. Rows must lie within the shard.
    pub fn taps(&self, first: u64, rows: u64) -> Range<u64> {
        let start = self.header.len() as u64 + first * self.tap_row;
        start..start + rows * self.tap_row
    }

    /// File bytes of `rows` last states from `first` on. Rows must lie within the shard.
    pub fn last(&self, first: u64, rows: u64) -> Range<u64> {
        let start = self.last_start + first * self.last_row;
        start..start + rows * self.last_row
    }
}

/// A safetensors header, padded with spaces as the format allows.
fn header(layout: &Layout, [rows, last_rows]: [u64; 2], [taps_end, last_end]: [u64; 2]) -> Vec<u8> {
    let dtype = match layout.encoding {
        Encoding::Bf16 => "BF16",
    };
    // `format` is what transformers looks for before it loads a file.
    let json = json!({
        "__metadata__": {"format": "pt"},
        "taps": {"dtype": dtype, "shape": [rows, layout.taps.len() * layout.hidden_size], "data_offsets": [0, taps_end]},
        "last": {"dtype": dtype, "shape": [last_rows, layout.hidden_size], "data_offsets": [taps_end, last_end]},
    });
    let mut text = json.to_string();
    let padded = (8 + text.len()).next_multiple_of(ALIGNMENT);
    text.extend(std::iter::repeat_n(' ', padded - 8 - text.len()));
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}
