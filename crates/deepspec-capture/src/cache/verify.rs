//! Checks every byte of a cache.

use std::fmt;
use std::path::Path;

use deepspec_core::digest::Hasher;
use rayon::prelude::*;

use crate::cache::codec;
use crate::cache::error::CacheError;
use crate::cache::files::ShardEntry;
use crate::cache::layout::Layout;
use crate::cache::manifest::Manifest;
use crate::cache::reader::map::MappedShard;
use crate::cache::reader::read_checked_parts;
use crate::cache::samples::{Row, SAMPLES_FILE, Table};

/// Bytes hashed between two progress reports.
const PROGRESS_STEP_BYTES: usize = 4 << 20;

/// A problem of a cache.
#[derive(Debug)]
pub struct Problem {
    /// Name of the file within the cache.
    pub file: String,
    /// Id of the sample, if the problem concerns one sample.
    pub sample: Option<String>,
    /// The error.
    pub error: CacheError,
}

impl fmt::Display for Problem {
    /// The error in one line, with the file's path and the sample.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

/// Checks all bytes of the cache in `dir` on all cores: digests of files, headers, sample
/// checksums, NaN and infinities. `progress` is called from several threads with the number of
/// bytes just read. They sum to [`Manifest::bytes`] unless a file cannot be read.
///
/// # Errors
/// Fails only without a usable manifest. All other errors are returned as [`Problem`]s; an empty
/// list means an intact cache.
pub fn verify(dir: &Path, progress: impl Fn(u64) + Sync) -> Result<Vec<Problem>, CacheError> {
    let manifest = Manifest::read(dir)?;
    let layout = manifest.layout();
    let mut problems = Vec::new();
    let table = Table::read(dir, &manifest);
    progress(manifest.samples.bytes);
    let table = table.unwrap_or_else(|error| {
        // Without the table, the digests still show whether shards are intact.
        problems.push(Problem { file: SAMPLES_FILE.to_string(), sample: None, error });
        Table::default()
    });
    let found: Vec<Vec<Problem>> = manifest
        .shards
        .par_iter()
        .enumerate()
        .map(|(index, entry)| {
            let start = table.rows().partition_point(|row| row.place.shard < index);
            let end = table.rows().partition_point(|row| row.place.shard <= index);
            shard_problems(dir, &layout, (index, entry), &table.rows()[start..end], &progress)
        })
        .collect();
    problems.extend(found.into_iter().flatten());
    Ok(problems)
}

fn shard_problems(
    dir: &Path,
    layout: &Layout,
    (index, entry): (usize, &ShardEntry),
    rows: &[Row],
    progress: &(impl Fn(u64) + Sync),
) -> Vec<Problem> {
    let problem = |sample: Option<&Row>, error| Problem {
        file: entry.file.clone(),
        sample: sample.map(|row| row.id.clone()),
        error,
    };
    let shard = match MappedShard::open(dir, layout, index, entry) {
        Ok(shard) => shard,
        Err(error) => return vec![problem(None, error)],
    };
    let digest = || {
        let mut hasher = Hasher::default();
        for bytes in shard.bytes().chunks(PROGRESS_STEP_BYTES) {
            hasher.update_raw(bytes);
            progress(bytes.len() as u64);
        }
        let (found, expected) = (hasher.hex_digest(), entry.sha256.clone());
        let path = shard.path().to_path_buf();
        (found != expected).then(|| problem(None, CacheError::Digest { path, found, expected }))
    };
    let samples = || -> Vec<Problem> {
        let damage =
            |row: &Row| find_sample_damage(&shard, layout, row).map(|error| problem(Some(row), error));
        rows.par_iter().filter_map(damage).collect()
    };
    // A digest is sequential, so the other cores check the samples meanwhile.
    let (digest, samples) = rayon::join(digest, samples);
    digest.into_iter().chain(samples).collect()
}

fn find_sample_damage(shard: &MappedShard, layout: &Layout, row: &Row) -> Option<CacheError> {
    let look = || -> Result<(), CacheError> {
        let [taps, last] =
            codec::decode_to_bf16(layout, read_checked_parts(shard, row)?).map_err(row.decompress_error())?;
        match codec::first_non_finite(layout, [&taps, &last]) {
            None => Ok(()),
            Some((at, part, value)) => {
                Err(CacheError::NotFinite { sample: row.id.clone(), row: at, part, value })
            }
        }
    };
    look().err()
}
