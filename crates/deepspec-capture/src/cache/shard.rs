//! Layout of a shard file: a safetensors header of known size, `taps`, `last`, then scales or
//! compressed exponents, depending on the encoding.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::cache::error::CacheError;
use crate::cache::files::ShardEntry;
use crate::cache::layout::{Encoding, Layout};

/// The data starts at a multiple of this, so that rows are aligned.
const ALIGNMENT_BYTES: usize = 64;

/// `shard-00012.safetensors`.
pub(crate) fn file_name(shard: usize) -> String {
    format!("shard-{shard:05}.safetensors")
}

/// Whether a file name has the form of [`file_name`].
pub(crate) fn is_file_name(name: &str) -> bool {
    let number = name.strip_prefix("shard-").and_then(|rest| rest.strip_suffix(".safetensors"));
    number.is_some_and(|number| number.len() >= 5 && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The shard's path in `dir`.
pub(crate) fn path(dir: &Path, shard: usize) -> PathBuf {
    dir.join(file_name(shard))
}

/// Byte offsets of the tensors in a shard file: N rows of m·d values, then M rows of d values, then
/// the scales of both, then exponents.
#[derive(Debug)]
pub(crate) struct Geometry {
    header: Vec<u8>,
    /// The five tensors in file order: `taps`, `last`, `taps_scale`, `last_scale`, `exponents`. A row of `exponents` is one
    /// byte.
    regions: [Region; 5],
    bytes: u64,
}

/// A tensor in the file, as rows of equal size.
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

/// One value per region of a shard file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parts<T> {
    pub taps: T,
    pub last: T,
    pub taps_scale: T,
    pub last_scale: T,
    pub exponents: T,
}

impl<T> Parts<T> {
    /// Borrows each value.
    pub fn each_ref(&self) -> Parts<&T> {
        let Self { taps, last, taps_scale, last_scale, exponents } = self;
        Parts { taps, last, taps_scale, last_scale, exponents }
    }

    /// Applies `f` to each value.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Parts<U> {
        Parts {
            taps: f(self.taps),
            last: f(self.last),
            taps_scale: f(self.taps_scale),
            last_scale: f(self.last_scale),
            exponents: f(self.exponents),
        }
    }

    /// The values in file order.
    pub fn in_file_order(self) -> [T; 5] {
        [self.taps, self.last, self.taps_scale, self.last_scale, self.exponents]
    }
}

/// Offsets and counts of a sample's rows and exponents in its shard.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SampleExtent {
    pub first: u64,
    pub count: u64,
    pub first_last: u64,
    pub last_count: u64,
    pub first_exponent: u64,
    pub exponent_bytes: u64,
}

impl Geometry {
    /// Layout of a shard with `rows` tokens, `last_rows` final states, and `exponents` bytes of
    /// compressed exponents.
    ///
    /// # Errors
    /// Fails if there are no values, or if sizes exceed 64 bits.
    pub fn new(layout: &Layout, rows: u64, last_rows: u64, exponents: u64) -> Result<Self, CacheError> {
        let bad = || CacheError::BadLayout { taps: layout.taps.len(), hidden_size: layout.hidden_size, rows };
        let (tap_row, last_row) = layout.tap_row_bytes().zip(layout.last_row_bytes()).ok_or_else(bad)?;
        let taps = tap_row.checked_mul(rows).filter(|_| rows > 0).ok_or_else(bad)?;
        let data = layout.sample_bytes(rows, last_rows).and_then(|data| data.checked_add(exponents));
        // The parts are smaller than the sum, so they cannot overflow.
        let (taps_scale, last_scale) = (layout.tap_scales_bytes(), layout.last_scale_bytes());
        let data = data.ok_or_else(bad)?;
        let sizes = [taps, last_row * last_rows, taps_scale * rows, last_scale * last_rows, exponents];
        let header = build_header(layout, [rows, last_rows], sizes);
        let bytes = data.checked_add(header.len() as u64).ok_or_else(bad)?;
        let mut start = header.len() as u64;
        let row_bytes = [tap_row, last_row, taps_scale, last_scale, 1];
        let regions = std::array::from_fn(|index| {
            let region = Region { start, row: row_bytes[index] };
            start += sizes[index];
            region
        });
        Ok(Self { header, regions, bytes })
    }

    /// Layout of a finished shard; `None` if its size contradicts its rows.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn from_entry(layout: &Layout, entry: &ShardEntry) -> Result<Option<Self>, CacheError> {
        let exponents = exponent_bytes(layout, entry)?;
        exponents.map(|exponents| Self::new(layout, entry.rows, entry.last_rows, exponents)).transpose()
    }

    /// The first bytes of the file, up to the data.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Size of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Offsets of the tensors, in file order.
    pub fn starts(&self) -> [u64; 5] {
        self.regions.map(|region| region.start)
    }

    /// File ranges of a sample's rows, which must be within the shard.
    pub fn sample(&self, rows: SampleExtent) -> Parts<Range<u64>> {
        let [taps, last, taps_scale, last_scale, exponents] = self.regions;
        Parts {
            taps: taps.rows(rows.first, rows.count),
            last: last.rows(rows.first_last, rows.last_count),
            taps_scale: taps_scale.rows(rows.first, rows.count),
            last_scale: last_scale.rows(rows.first_last, rows.last_count),
            exponents: exponents.rows(rows.first_exponent, rows.exponent_bytes),
        }
    }
}

/// Bytes of compressed exponents in a shard: the file size minus the header and all other tensors.
/// `None` if the size is impossible.
///
/// # Errors
/// As [`Geometry::new`].
pub(crate) fn exponent_bytes(layout: &Layout, entry: &ShardEntry) -> Result<Option<u64>, CacheError> {
    // The length of the header does not depend on the size of the exponents.
    let rest = entry.bytes.checked_sub(Geometry::new(layout, entry.rows, entry.last_rows, 0)?.bytes());
    Ok(rest.filter(|&rest| rest == 0 || layout.encoding.compresses()))
}

/// A safetensors header, padded with spaces as the format allows. Its length does not depend on the
/// size of the exponents, because that is known last.
fn build_header(layout: &Layout, rows: [u64; 2], sizes: [u64; 5]) -> Vec<u8> {
    let mut text = header_text(layout, rows, sizes);
    let [taps, last, ..] = sizes;
    let longest = match layout.encoding {
        Encoding::Bf16z => header_text(layout, rows, [taps, last, 0, 0, u64::MAX - taps - last]).len(),
        Encoding::Bf16 | Encoding::Fp8 => text.len(),
    };
    let padded = (8 + longest).next_multiple_of(ALIGNMENT_BYTES);
    text.extend(std::iter::repeat_n(' ', padded - 8 - text.len()));
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn header_text(layout: &Layout, [rows, last_rows]: [u64; 2], sizes: [u64; 5]) -> String {
    let dtype = match layout.encoding {
        Encoding::Bf16 => "BF16",
        Encoding::Bf16z => "U8",
        Encoding::Fp8 => "F8_E4M3",
    };
    let mut end = 0;
    let [taps, last, taps_scale, last_scale, exponents] = sizes.map(|size| {
        let offsets = [end, end + size];
        end += size;
        offsets
    });
    // transformers checks `format` before it loads a file.
    let mut json = json!({
        "__metadata__": {"format": "pt"},
        "taps": {"dtype": dtype, "shape": [rows, layout.taps.len() * layout.hidden_size], "data_offsets": taps},
        "last": {"dtype": dtype, "shape": [last_rows, layout.hidden_size], "data_offsets": last},
    });
    match layout.encoding {
        Encoding::Bf16 => {}
        Encoding::Bf16z => {
            json["exponents"] =
                json!({"dtype": "U8", "shape": [exponents[1] - exponents[0]], "data_offsets": exponents});
        }
        Encoding::Fp8 => {
            json["taps_scale"] =
                json!({"dtype": "BF16", "shape": [rows, layout.taps.len()], "data_offsets": taps_scale});
            json["last_scale"] = json!({"dtype": "BF16", "shape": [last_rows], "data_offsets": last_scale});
        }
    }
    json.to_string()
}
