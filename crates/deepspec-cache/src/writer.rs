//! Streams one shard to disk.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError, partial_name};
use deepspec_core::digest::Hasher;
use serde::{Deserialize, Serialize};

use crate::error::{CacheError, Part};
use crate::fp8;
use crate::layout::{Encoding, Layout};
use crate::manifest::{ShardEntry, is_absent};
use crate::plan::{Plan, PlannedSample, PlannedShard};
use crate::shard::{self, Geometry, Parts, Rows};
use crate::values;

/// Bytes read at a time where a region is read back.
const READ_BACK: usize = 1 << 20;

/// What is known of a finished shard; the file beside it that makes it count as finished.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Sidecar {
    pub shard: ShardEntry,
    /// CRC-32 of each of its samples, in order.
    pub checksums: Vec<u32>,
}

impl Sidecar {
    /// Path of the sidecar of a shard in a worker's folder.
    pub fn path(part: &Path, shard: usize) -> PathBuf {
        part.join(format!("shard-{shard:05}.json"))
    }

    /// Path of the list of a shard's samples: what a merge, which has no plan, learns them from.
    pub fn samples_path(part: &Path, shard: usize) -> PathBuf {
        part.join(format!("shard-{shard:05}.samples.jsonl"))
    }

    /// The sidecar of a shard that is whole, in `part` or already published to `dir`. Anything less counts as unfinished.
    pub fn of_finished(
        dir: &Path,
        part: &Path,
        plan: &Plan,
        shard: usize,
    ) -> Result<Option<Self>, CacheError> {
        let path = Self::path(part, shard);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if is_absent(&error) => return Ok(None),
            Err(error) => return Err(FileError::at("reading", &path)(error).into()),
        };
        let Ok(sidecar) = serde_json::from_slice::<Self>(&bytes) else { return Ok(None) };
        let (entry, planned) = (&sidecar.shard, &plan.shards()[shard]);
        let expected = Geometry::new(plan.layout(), planned.rows, planned.last_rows)?.bytes();
        let told = (entry.file.as_str(), entry.bytes, entry.rows, entry.last_rows, sidecar.checksums.len());
        let fits = told
            == (
                shard::file_name(shard).as_str(),
                expected,
                planned.rows,
                planned.last_rows,
                planned.samples.len(),
            );
        let whole =
            |dir: &Path| fs::metadata(shard::path(dir, shard)).is_ok_and(|file| file.len() == expected);
        let fits = fits && Self::samples_path(part, shard).exists();
        let there = whole(part) || (!shard::path(part, shard).exists() && whole(dir));
        Ok((fits && there).then_some(sidecar))
    }
}

/// Takes the hidden states of one shard's samples, in order, and writes them where they belong.
///
/// Both tensors grow at once, so no more than the sample at hand is in memory. May be sent to another thread.
/// Dropped before [`Self::finish`], it leaves a `.partial` file that the next attempt overwrites.
pub struct ShardWriter<'p> {
    plan: &'p Plan,
    planned: &'p PlannedShard,
    part: PathBuf,
    index: usize,
    path: PathBuf,
    partial: PathBuf,
    file: File,
    geometry: Geometry,
    /// Over the header and the taps so far: what comes first in the file.
    hasher: Hasher,
    row: u64,
    last_row: u64,
    checksums: Vec<u32>,
}

impl<'p> ShardWriter<'p> {
    pub(crate) fn create(part: &Path, plan: &'p Plan, index: usize) -> Result<Self, CacheError> {
        let planned = &plan.shards()[index];
        let geometry = Geometry::new(plan.layout(), planned.rows, planned.last_rows)?;
        let path = shard::path(part, index);
        let partial = partial_name(&path);
        // A stale sidecar must not vouch for the file that is about to be written.
        let sidecar = Sidecar::path(part, index);
        match fs::remove_file(&sidecar) {
            Err(error) if !is_absent(&error) => return Err(FileError::at("removing", &sidecar)(error).into()),
            _ => {}
        }
        let open = || -> io::Result<File> {
            let file =
                OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&partial)?;
            file.set_len(geometry.bytes())?;
            file.write_all_at(geometry.header(), 0)?;
            Ok(file)
        };
        let file = open().map_err(FileError::at("writing", &partial))?;
        let mut hasher = Hasher::default();
        hasher.raw(geometry.header());
        let (part, checksums) = (part.to_path_buf(), Vec::with_capacity(planned.samples.len()));
        Ok(Self {
            plan,
            planned,
            part,
            index,
            path,
            partial,
            file,
            geometry,
            hasher,
            row: 0,
            last_row: 0,
            checksums,
        })
    }

    /// Number of the shard.
    pub fn shard(&self) -> usize {
        self.index
    }

    /// All samples of the shard, in the order in which they must be pushed.
    pub fn samples(&self) -> &'p [PlannedSample] {
        &self.plan.samples()[self.planned.samples.clone()]
    }

    /// The shape of the rows.
    pub fn layout(&self) -> &'p Layout {
        self.plan.layout()
    }

    /// Samples pushed so far.
    pub fn pushed(&self) -> usize {
        self.checksums.len()
    }

    /// Writes the next sample: `taps [L, m·d]` and `last [K, d]` as little-endian bfloat16, row-major, without gaps.
    /// They are stored in the cache's encoding.
    ///
    /// K is the number of [`PlannedSample::last_positions`], L its length.
    ///
    /// # Errors
    /// Wrong sizes, a NaN or infinity (nothing of the sample is kept then), more samples than planned, I/O failures.
    pub fn push(&mut self, taps: &[u8], last: &[u8]) -> Result<(), CacheError> {
        let Some(sample) = self.samples().get(self.checksums.len()) else {
            return Err(CacheError::ShardFull { path: self.path.clone(), samples: self.samples().len() });
        };
        let (layout, d) = (self.plan.layout(), self.plan.layout().hidden_size);
        let (count, last_count) =
            (u64::from(sample.length()), sample.last_positions(layout.last).len() as u64);
        let value_bytes = Encoding::Bf16.value_bytes() as u64;
        let row = d as u64 * value_bytes;
        for (part, bytes, expected) in
            [(Part::Taps, taps, count * layout.taps.len() as u64 * row), (Part::Last, last, last_count * row)]
        {
            if bytes.len() as u64 != expected {
                return Err(CacheError::WrongSize {
                    sample: sample.id.clone(),
                    part,
                    found: bytes.len(),
                    expected,
                });
            }
        }
        let plain = Parts { taps, last, taps_scale: &[], last_scale: &[] };
        if let Some((row, part, value)) = first_non_finite(&layout.plain(), plain) {
            return Err(CacheError::NotFinite { sample: sample.id.clone(), row, part, value });
        }
        let rows = Rows { first: self.row, count, first_last: self.last_row, last_count };
        let places = self.geometry.sample(rows).in_order();
        let write = |stored: Parts<&[u8]>| {
            let parts = stored.in_order().into_iter().zip(&places);
            parts.into_iter().try_for_each(|(bytes, place)| self.file.write_all_at(bytes, place.start))
        };
        let write = |stored| write(stored).map_err(FileError::at("writing", &self.partial));
        let (encoded_taps, encoded_last);
        let stored = match layout.encoding {
            Encoding::Bf16 => plain,
            Encoding::Fp8 => {
                (encoded_taps, encoded_last) = (fp8::encode(taps, d), fp8::encode(last, d));
                Parts {
                    taps: &encoded_taps.codes[..],
                    last: &encoded_last.codes,
                    taps_scale: &encoded_taps.scales,
                    last_scale: &encoded_last.scales,
                }
            }
        };
        write(stored)?;
        self.hasher.raw(stored.taps);
        self.checksums.push(checksum(stored));
        self.row += count;
        self.last_row += last_count;
        Ok(())
    }

    /// Syncs the shard, renames it into place and writes its sidecar: from then on a resumed build keeps it.
    ///
    /// # Errors
    /// Samples are missing, I/O failures.
    pub fn finish(mut self) -> Result<(), CacheError> {
        let (found, expected) = (self.pushed(), self.samples().len());
        if found != expected {
            return Err(CacheError::ShardShort { path: self.path, found, expected });
        }
        self.hash_rest().map_err(FileError::at("reading", &self.partial))?;
        let commit = || -> io::Result<()> {
            self.file.sync_all()?;
            fs::rename(&self.partial, &self.path)
        };
        commit().map_err(FileError::at("writing", &self.path))?;
        let shard = ShardEntry {
            file: shard::file_name(self.index),
            bytes: self.geometry.bytes(),
            rows: self.planned.rows,
            last_rows: self.planned.last_rows,
            sha256: self.hasher.hex(),
        };
        atomic::replace(&Sidecar::samples_path(&self.part, self.index), |file| {
            for sample in &self.plan.samples()[self.planned.samples.clone()] {
                serde_json::to_writer(&mut *file, sample)?;
                file.write_all(b"\n")?;
            }
            Ok(())
        })?;
        let sidecar = Sidecar { shard, checksums: self.checksums };
        Ok(atomic::write_json(&Sidecar::path(&self.part, self.index), &sidecar)?)
    }

    /// Reads what stands behind the taps back into the digest: it grew beside them.
    fn hash_rest(&mut self) -> io::Result<()> {
        let region = self.geometry.behind_taps();
        let (mut at, mut buffer) = (region.start, vec![0; READ_BACK]);
        while at < region.end {
            let chunk = &mut buffer[..(region.end - at).min(READ_BACK as u64) as usize];
            self.file.read_exact_at(chunk, at)?;
            self.hasher.raw(chunk);
            at += chunk.len() as u64;
        }
        Ok(())
    }
}

/// CRC-32 of a sample's stored taps, last states and the scales of both.
pub(crate) fn checksum(stored: Parts<&[u8]>) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    stored.in_order().into_iter().for_each(|bytes| hasher.update(bytes));
    hasher.finalize()
}

/// Row, tensor and value of a stored sample's first NaN or infinity.
pub(crate) fn first_non_finite(layout: &Layout, stored: Parts<&[u8]>) -> Option<(usize, Part, f32)> {
    let d = layout.hidden_size;
    let first = |states: &[u8], scales: &[u8]| match layout.encoding {
        Encoding::Bf16 => values::first_non_finite(states),
        Encoding::Fp8 => fp8::first_non_finite(states, scales, d),
    };
    if let Some((index, value)) = first(stored.taps, stored.taps_scale) {
        let (row, column) = (index / (layout.taps.len() * d), index % (layout.taps.len() * d));
        return Some((row, Part::Tap(layout.taps[column / d]), value));
    }
    first(stored.last, stored.last_scale).map(|(index, value)| (index / d, Part::Last, value))
}
