//! Writes one shard to disk.

use std::borrow::Cow;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::iter;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError, partial_path};
use deepspec_core::digest::Hasher;
use serde::{Deserialize, Serialize};

use crate::cache::codec;
use crate::cache::error::{CacheError, Part};
use crate::cache::files::ShardEntry;
use crate::cache::layout::{Encoding, Layout};
use crate::cache::manifest::is_not_found;
use crate::cache::pieces::PieceWriter;
use crate::cache::plan::{Plan, PlannedShard};
use crate::cache::sample::PlannedSample;
use crate::cache::samples::WrittenSample;
use crate::cache::shard::{self, Geometry};

/// Bytes read at a time to compute the digest of a finished shard.
const DIGEST_BUFFER_BYTES: usize = 1 << 20;

/// The sidecar of a finished shard: its digest and checksums. A shard without it is unfinished.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShardMeta {
    pub shard: ShardEntry,
    /// CRC-32 of each sample, in order.
    pub checksums: Vec<u32>,
    /// Bytes of each sample's compressed exponents, in order; empty without compression.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exponent_bytes: Vec<u64>,
}

impl ShardMeta {
    /// Path of the sidecar of a shard in a worker's folder.
    pub fn path(part: &Path, shard: usize) -> PathBuf {
        part.join(format!("shard-{shard:05}.json"))
    }

    /// Path of the list of a shard's samples. A merge, which has no plan, reads the samples from
    /// it.
    pub fn shard_samples_path(part: &Path, shard: usize) -> PathBuf {
        part.join(format!("shard-{shard:05}.samples.jsonl"))
    }

    /// Checksum and compressed size of each sample, in order.
    pub fn written_samples(&self) -> impl Iterator<Item = WrittenSample> {
        let bytes = self.exponent_bytes.iter().copied().chain(iter::repeat(0));
        let sums = self.checksums.iter().copied();
        sums.zip(bytes).map(|(checksum, exponent_bytes)| WrittenSample { checksum, exponent_bytes })
    }

    /// The sidecar of a finished shard, in `part` or already published to `dir`. `None` for any
    /// incomplete or inconsistent shard.
    pub fn read_finished(
        dir: &Path,
        part: &Path,
        plan: &Plan,
        shard: usize,
    ) -> Result<Option<Self>, CacheError> {
        let path = Self::path(part, shard);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if is_not_found(&error) => return Ok(None),
            Err(error) => return Err(FileError::at("reading", &path)(error).into()),
        };
        let Ok(sidecar) = serde_json::from_slice::<Self>(&bytes) else { return Ok(None) };
        let (entry, planned) = (&sidecar.shard, &plan.shards()[shard]);
        let (layout, samples) = (plan.layout(), planned.samples.len());
        let exponents = sidecar.exponent_bytes.iter().fold(0, |sum: u64, &bytes| sum.saturating_add(bytes));
        let Ok(geometry) = Geometry::new(layout, planned.rows, planned.last_rows, exponents) else {
            return Ok(None);
        };
        let (expected, compressed) =
            (geometry.bytes(), if layout.encoding.compresses() { samples } else { 0 });
        let told = (entry.file.as_str(), entry.bytes, entry.rows, entry.last_rows, sidecar.checksums.len());
        let fits = told
            == (shard::file_name(shard).as_str(), expected, planned.rows, planned.last_rows, samples)
            && sidecar.exponent_bytes.len() == compressed;
        let whole =
            |dir: &Path| fs::metadata(shard::path(dir, shard)).is_ok_and(|file| file.len() == expected);
        let fits = fits && Self::shard_samples_path(part, shard).exists();
        let there = whole(part) || (!shard::path(part, shard).exists() && whole(dir));
        Ok((fits && there).then_some(sidecar))
    }
}

/// Writes the hidden states of one shard's samples, which are pushed in order.
///
/// All tensors are written in parallel, so only the current sample and a piece of each tensor are
/// in memory. The writer may be sent to another thread. If dropped before [`Self::finish`], it
/// leaves a `.partial` file that the next attempt overwrites.
pub struct ShardWriter<'p> {
    plan: &'p Plan,
    planned: &'p PlannedShard,
    part: PathBuf,
    index: usize,
    path: PathBuf,
    partial: PathBuf,
    file: File,
    /// One writer per tensor, in file order. Exponents come last, because their size is known last.
    tensors: [PieceWriter; 5],
    exponents: u64,
    checksums: Vec<u32>,
    exponent_bytes: Vec<u64>,
}

impl<'p> ShardWriter<'p> {
    pub(crate) fn create(part: &Path, plan: &'p Plan, index: usize) -> Result<Self, CacheError> {
        let planned = &plan.shards()[index];
        let geometry = Geometry::new(plan.layout(), planned.rows, planned.last_rows, 0)?;
        let path = shard::path(part, index);
        let partial = partial_path(&path);
        // Removes a stale sidecar, which would mark the new file as finished.
        let sidecar = ShardMeta::path(part, index);
        match fs::remove_file(&sidecar) {
            Err(error) if !is_not_found(&error) => {
                return Err(FileError::at("removing", &sidecar)(error).into());
            }
            _ => {}
        }
        let open = || -> io::Result<File> {
            let file =
                OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&partial)?;
            file.set_len(geometry.bytes())?;
            Ok(file)
        };
        let file = open().map_err(FileError::at("writing", &partial))?;
        let (part, checksums) = (part.to_path_buf(), Vec::with_capacity(planned.samples.len()));
        Ok(Self {
            plan,
            planned,
            part,
            index,
            path,
            partial,
            file,
            tensors: geometry.starts().map(PieceWriter::from),
            exponents: 0,
            checksums,
            exponent_bytes: Vec::new(),
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

    /// Number of samples pushed so far.
    pub fn pushed(&self) -> usize {
        self.checksums.len()
    }

    /// Writes the next sample: `taps [L, m·d]` and `last [K, d]` as contiguous little-endian
    /// bfloat16, row-major. They are stored in the cache's encoding.
    ///
    /// L is the sample's length, and K the number of its [`PlannedSample::last_positions`].
    ///
    /// # Errors
    /// Fails on wrong sizes, on NaN or infinity (then nothing of the sample is written), on more
    /// samples than planned, and on I/O failures.
    pub fn push(&mut self, taps: &[u8], last: &[u8]) -> Result<(), CacheError> {
        let Some(sample) = self.samples().get(self.checksums.len()) else {
            return Err(CacheError::ShardFull { path: self.path.clone(), samples: self.samples().len() });
        };
        let layout = self.plan.layout();
        let (count, last_count) =
            (u64::from(sample.length()), sample.last_positions(layout.last).len() as u64);
        let value_bytes = Encoding::Bf16.value_bytes() as u64;
        let row = layout.hidden_size as u64 * value_bytes;
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
        if let Some((row, part, value)) = codec::first_non_finite(layout, [taps, last]) {
            return Err(CacheError::NotFinite { sample: sample.id.clone(), row, part, value });
        }
        let (file, tensors) = (&self.file, &mut self.tensors);
        let mut write = || -> io::Result<(u64, u32)> {
            let stored = codec::encode(layout, [taps, last])?;
            let stored = stored.each_ref().map(Cow::as_ref);
            for (tensor, bytes) in tensors.iter_mut().zip(stored.in_file_order()) {
                tensor.push(file, bytes)?;
            }
            Ok((stored.exponents.len() as u64, codec::checksum(stored)))
        };
        let (exponent_bytes, checksum) = write().map_err(FileError::at("writing", &self.partial))?;
        self.checksums.push(checksum);
        if layout.encoding.compresses() {
            self.exponent_bytes.push(exponent_bytes);
        }
        self.exponents += exponent_bytes;
        Ok(())
    }

    /// Syncs the shard, renames it into place and writes its sidecar. Resumed builds then keep it.
    ///
    /// # Errors
    /// Fails if samples are missing, and on I/O failures.
    pub fn finish(mut self) -> Result<(), CacheError> {
        let (found, expected) = (self.pushed(), self.samples().len());
        if found != expected {
            return Err(CacheError::ShardShort { path: self.path, found, expected });
        }
        let PlannedShard { rows, last_rows, .. } = *self.planned;
        let geometry = Geometry::new(self.layout(), rows, last_rows, self.exponents)?;
        let mut commit = || -> io::Result<String> {
            self.tensors.iter_mut().try_for_each(|tensor| tensor.flush(&self.file))?;
            self.file.write_all_at(geometry.header(), 0)?;
            let sha256 = digest_written_file(&self.file, geometry.bytes())?;
            self.file.sync_all()?;
            fs::rename(&self.partial, &self.path)?;
            Ok(sha256)
        };
        let sha256 = commit().map_err(FileError::at("writing", &self.path))?;
        let (file, bytes) = (shard::file_name(self.index), geometry.bytes());
        let shard = ShardEntry { file, bytes, rows, last_rows, sha256 };
        atomic::replace(&ShardMeta::shard_samples_path(&self.part, self.index), |file| {
            for sample in &self.plan.samples()[self.planned.samples.clone()] {
                serde_json::to_writer(&mut *file, sample)?;
                file.write_all(b"\n")?;
            }
            Ok(())
        })?;
        let sidecar = ShardMeta { shard, checksums: self.checksums, exponent_bytes: self.exponent_bytes };
        Ok(atomic::write_json(&ShardMeta::path(&self.part, self.index), &sidecar)?)
    }
}

/// Digest of a shard of `bytes` bytes. The file is read again, because its tensors were written in
/// parallel.
fn digest_written_file(file: &File, bytes: u64) -> io::Result<String> {
    let (mut hasher, mut at, mut buffer) = (Hasher::default(), 0, vec![0; DIGEST_BUFFER_BYTES]);
    while at < bytes {
        let chunk = &mut buffer[..(bytes - at).min(DIGEST_BUFFER_BYTES as u64) as usize];
        file.read_exact_at(chunk, at)?;
        hasher.update_raw(chunk);
        at += chunk.len() as u64;
    }
    Ok(hasher.hex_digest())
}
