//! The shape of a shard file: a safetensors header of known size, then `taps`, then `last`, then scales if there are any.

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

/// Where everything lies in a shard file: N rows of m·d values, then M rows of d values, then the scales of both.
#[derive(Debug)]
pub(crate) struct Geometry {
    header: Vec<u8>,
    /// `taps`, `last`, `taps_scale`, `last_scale`.
    regions: [Region; 4],
    bytes: u64,
}

/// Rows of one size.
#[derive(Debug, Clone, Copy)]
struct Region {
    start: u64,
    row: u64,
}

impl Region {
    fn rows(self, first: u64, rows: u64) -> Range<u64> {
        let start = self.start + first * self.row;
        start..start + rows * self.row
    }
}

/// Something for each of the regions in which a sample has rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parts<T> {
    pub taps: T,
    pub last: T,
    pub taps_scale: T,
    pub last_scale: T,
}

impl<T> Parts<T> {
    /// In the order of the file.
    pub fn in_order(self) -> [T; 4] {
        [self.taps, self.last, self.taps_scale, self.last_scale]
    }
}

/// Where a sample's rows begin in its shard, and how many they are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    pub first: u64,
    pub count: u64,
    pub first_last: u64,
    pub last_count: u64,
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
        // The parts of a sum that fits fit too.
        let (taps_scale, last_scale) = (layout.tap_scales_bytes(), layout.last_scale_bytes());
        let sizes = [taps, last_row * last_rows, taps_scale * rows, last_scale * last_rows];
        let header = header(layout, [rows, last_rows], sizes);
        let bytes = data.checked_add(header.len() as u64).ok_or_else(bad)?;
        let mut start = header.len() as u64;
        let regions =
            [(tap_row, sizes[0]), (last_row, sizes[1]), (taps_scale, sizes[2]), (last_scale, sizes[3])].map(
                |(row, size)| {
                    let region = Region { start, row };
                    start += size;
                    region
                },
            );
        Ok(Self { header, regions, bytes })
    }

    /// The file's first bytes, up to the data.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Size of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// File bytes of a sample's rows, which must lie within the shard.
    pub fn sample(&self, rows: Rows) -> Parts<Range<u64>> {
        let [taps, last, taps_scale, last_scale] = self.regions;
        Parts {
            taps: taps.rows(rows.first, rows.count),
            last: last.rows(rows.first_last, rows.last_count),
            taps_scale: taps_scale.rows(rows.first, rows.count),
            last_scale: last_scale.rows(rows.first_last, rows.last_count),
        }
    }

    /// File bytes of everything behind the taps.
    pub fn behind_taps(&self) -> Range<u64> {
        self.regions[1].start..self.bytes
    }
}

/// A safetensors header, padded with spaces as the format allows.
fn header(layout: &Layout, [rows, last_rows]: [u64; 2], sizes: [u64; 4]) -> Vec<u8> {
    let dtype = match layout.encoding {
        Encoding::Bf16 => "BF16",
        Encoding::Fp8 => "F8_E4M3",
    };
    let mut end = 0;
    let [taps, last, taps_scale, last_scale] = sizes.map(|size| {
        let offsets = [end, end + size];
        end += size;
        offsets
    });
    // `format` is what transformers looks for before it loads a file.
    let mut json = json!({
        "__metadata__": {"format": "pt"},
        "taps": {"dtype": dtype, "shape": [rows, layout.taps.len() * layout.hidden_size], "data_offsets": taps},
        "last": {"dtype": dtype, "shape": [last_rows, layout.hidden_size], "data_offsets": last},
    });
    if layout.encoding == Encoding::Fp8 {
        json["taps_scale"] =
            json!({"dtype": "BF16", "shape": [rows, layout.taps.len()], "data_offsets": taps_scale});
        json["last_scale"] = json!({"dtype": "BF16", "shape": [last_rows], "data_offsets": last_scale});
    }
    let mut text = json.to_string();
    let padded = (8 + text.len()).next_multiple_of(ALIGNMENT);
    text.extend(std::iter::repeat_n(' ', padded - 8 - text.len()));
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}
