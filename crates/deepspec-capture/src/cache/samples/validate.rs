//! Checks the rows of the samples' table against the manifest and each other.

use std::path::Path;

use crate::cache::error::CacheError;
use crate::cache::identity::Identity;
use crate::cache::layout::loss_mask;
use crate::cache::manifest::Manifest;
use crate::cache::sample::{count_supervised, find_bad_span, find_outside_vocab};
use crate::cache::shard::{self, SampleExtent};

/// The numbers that a row of the table states. All of them follow from the previous rows, the token
/// ids and the spans.
pub(super) struct StatedRow {
    pub shard: i64,
    pub first_row: i64,
    pub first_last_row: i64,
    pub length: i64,
    pub supervised: i64,
    /// Offset of its compressed exponents in the shard, and their bytes; zeros without compression.
    pub first_exponent: i64,
    pub exponent_bytes: i64,
}

/// Location of a sample in the shards. Every number is recomputed instead of read from the table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SampleLocation {
    pub shard: usize,
    pub first_row: u64,
    pub first_last_row: u64,
    pub length: u32,
    pub last_rows: u64,
    pub first_exponent: u64,
    pub exponent_bytes: u64,
}

impl SampleLocation {
    /// The sample's rows within the shard.
    pub fn rows(&self) -> SampleExtent {
        SampleExtent {
            first: self.first_row,
            count: self.length.into(),
            first_last: self.first_last_row,
            last_count: self.last_rows,
            first_exponent: self.first_exponent,
            exponent_bytes: self.exponent_bytes,
        }
    }
}

/// Recomputes the location of each row, so that later reads never depend on unverified numbers of
/// the file.
pub(super) struct RowValidator<'m> {
    pub path: &'m Path,
    manifest: &'m Manifest,
    shard: usize,
    row: u64,
    last_row: u64,
    exponent: u64,
    supervised: u64,
    /// Bytes of compressed exponents in each shard.
    exponent_bytes: Vec<u64>,
}

impl<'m> RowValidator<'m> {
    pub fn new(path: &'m Path, manifest: &'m Manifest) -> Result<Self, CacheError> {
        let layout = manifest.layout();
        // A manifest that was read has valid sizes.
        let exponents = |shard| Ok(shard::exponent_bytes(&layout, shard)?.unwrap_or(0));
        let exponent_bytes = manifest.shards.iter().map(exponents).collect::<Result<_, CacheError>>()?;
        Ok(Self { path, manifest, shard: 0, row: 0, last_row: 0, exponent: 0, supervised: 0, exponent_bytes })
    }

    /// Checks row `index` and returns its location.
    pub fn check_row(
        &mut self,
        index: usize,
        claim: &StatedRow,
        ids: &[i32],
        spans: &[(u32, u32)],
    ) -> Result<SampleLocation, CacheError> {
        let length = u32::try_from(ids.len()).unwrap_or(0);
        self.check_equal(index, "length", claim.length, length)?;
        if length == 0 {
            return Err(self.contradiction(index, "length", 0, "at least 1"));
        }
        let Identity { max_length, vocab_size, .. } = self.manifest.identity;
        if ids.len() > max_length {
            return Err(self.contradiction(
                index,
                "length",
                length,
                format!("at most max_length {max_length}"),
            ));
        }
        if let Some(token) = find_outside_vocab(ids, vocab_size) {
            return Err(self.contradiction(
                index,
                "input_ids",
                ids[token],
                format!("an id below {vocab_size}"),
            ));
        }
        if let Some((after, (start, end))) = find_bad_span(length, spans) {
            let expected = format!("a non-empty span within {after}..{length}");
            return Err(self.contradiction(index, "loss_spans", format!("{start}..{end}"), expected));
        }
        self.check_equal(index, "supervised", claim.supervised, count_supervised(spans))?;
        // The previous shard is full when all its rows are used; no shard of a plan is empty.
        if self.manifest.shards.get(self.shard).is_some_and(|shard| shard.rows == self.row) {
            self.check_shard_end(index)?;
            (self.shard, self.row, self.last_row, self.exponent) = (self.shard + 1, 0, 0, 0);
        }
        self.check_equal(index, "shard", claim.shard, self.shard)?;
        self.check_equal(index, "first_row", claim.first_row, self.row)?;
        self.check_equal(index, "first_last_row", claim.first_last_row, self.last_row)?;
        self.check_equal(index, "first_exponent", claim.first_exponent, self.exponent)?;
        let last_rows = self.manifest.last.kept_positions(&loss_mask(length, spans)).len() as u64;
        let Some(shard) = self.manifest.shards.get(self.shard) else {
            let shards = self.manifest.shards.len();
            return Err(self.contradiction(index, "shard", self.shard, format!("one of {shards}")));
        };
        let (end, last_end) = (self.row + u64::from(length), self.last_row + last_rows);
        if end > shard.rows || last_end > shard.last_rows {
            let expected = format!("rows up to {} and {}", shard.rows, shard.last_rows);
            return Err(self.contradiction(
                index,
                "end",
                format!("row {end} and last row {last_end}"),
                expected,
            ));
        }
        let left = self.exponent_bytes[self.shard] - self.exponent;
        let Some(exponent_bytes) = u64::try_from(claim.exponent_bytes).ok().filter(|&bytes| bytes <= left)
        else {
            return Err(self.contradiction(
                index,
                "exponent_bytes",
                claim.exponent_bytes,
                format!("at most {left}"),
            ));
        };
        let place = SampleLocation {
            shard: self.shard,
            first_row: self.row,
            first_last_row: self.last_row,
            length,
            last_rows,
            first_exponent: self.exponent,
            exponent_bytes,
        };
        (self.row, self.last_row, self.exponent) = (end, last_end, self.exponent + exponent_bytes);
        self.supervised += u64::from(count_supervised(spans));
        Ok(place)
    }

    /// Checks the totals after all `rows`.
    pub fn check_totals(&self, rows: usize) -> Result<(), CacheError> {
        let counts = &self.manifest.counts;
        self.check_equal(rows, "number", rows, counts.samples)?;
        self.check_equal(rows, "supervised tokens of all rows", self.supervised, counts.supervised_tokens)?;
        self.check_equal(rows, "shards used", self.shard + 1, self.manifest.shards.len())?;
        self.check_shard_end(rows)
    }

    fn check_shard_end(&self, index: usize) -> Result<(), CacheError> {
        let shard = &self.manifest.shards[self.shard];
        self.check_equal(index, "rows of the shard before", self.row, shard.rows)?;
        self.check_equal(index, "last rows of the shard before", self.last_row, shard.last_rows)?;
        self.check_equal(
            index,
            "exponents of the shard before",
            self.exponent,
            self.exponent_bytes[self.shard],
        )
    }

    fn check_equal<A, B>(&self, index: usize, field: &str, found: A, expected: B) -> Result<(), CacheError>
    where
        A: TryInto<i128> + Copy,
        B: TryInto<i128> + Copy,
    {
        match (found.try_into(), expected.try_into()) {
            (Ok(found), Ok(expected)) if found == expected => Ok(()),
            (found, expected) => {
                Err(self.contradiction(index, field, found.unwrap_or(-1), expected.unwrap_or(-1)))
            }
        }
    }

    fn contradiction(
        &self,
        index: usize,
        field: &str,
        found: impl ToString,
        expected: impl ToString,
    ) -> CacheError {
        CacheError::Inconsistent {
            path: self.path.to_path_buf(),
            field: format!("row {index}: {field}"),
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }
}
