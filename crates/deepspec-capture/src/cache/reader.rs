//! Reads a finished cache: maps its shards, returns samples without copying, and checks each sample
//! on first read.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::cache::codec;
use crate::cache::error::{CacheError, Part};
use crate::cache::identity::Identity;
use crate::cache::layout::{Encoding, Layout, loss_mask};
use crate::cache::manifest::Manifest;
use crate::cache::samples::{Row, Table};
use crate::cache::shard::Parts;
use deepspec_core::FinalStates;

pub(crate) mod map;

use map::MappedShard;

/// Maximum bytes of mapped shards that stay in the process after [`Reader::read_into`]. The pages
/// remain in the system's page cache. Without this limit, a run would seem to use as much memory as
/// its cache has bytes. Releasing pages after every sample would cost more than copying a small
/// sample.
pub const MAX_MAPPED_BYTES: u64 = 128 << 20;

/// A finished cache, readable from any number of threads.
#[derive(Debug)]
pub struct Reader {
    dir: PathBuf,
    manifest: Manifest,
    layout: Layout,
    table: Table,
    shards: Vec<MappedShard>,
    /// One bit per sample: whether this reader has verified its checksum.
    seen: Vec<AtomicU64>,
    /// Pages read since the last release.
    touched: Mutex<TouchedPages>,
}

/// Bytes and shards read since pages were last released.
#[derive(Debug, Default)]
struct TouchedPages {
    bytes: u64,
    shards: BTreeSet<usize>,
}

impl Reader {
    /// Opens the cache in `dir`. Reads the manifest and the samples' table, and checks their
    /// digests and every shard's size and header. The data of shards is checked sample by sample on
    /// first read.
    ///
    /// # Errors
    /// Fails if there is no cache, or if anything in it was changed; the message names the file.
    pub fn open(dir: &Path) -> Result<Self, CacheError> {
        let manifest = Manifest::read(dir)?;
        let layout = manifest.layout();
        let table = Table::read(dir, &manifest)?;
        let open = |(index, entry)| MappedShard::open(dir, &layout, index, entry);
        let shards = manifest.shards.iter().enumerate().map(open).collect::<Result<_, _>>()?;
        let seen = (0..table.rows().len().div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { dir: dir.to_path_buf(), manifest, layout, table, shards, seen, touched: Mutex::default() })
    }

    /// The manifest of the cache.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The shape of the rows.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.table.rows().len()
    }

    /// Whether the cache has no samples; a published cache has at least one.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks that the cache has this identity.
    ///
    /// # Errors
    /// Lists the fields that differ, with both values.
    pub fn check_identity(&self, wanted: &Identity) -> Result<(), CacheError> {
        let differences = self.manifest.identity.differences(wanted);
        match differences.is_empty() {
            true => Ok(()),
            false => Err(CacheError::Mismatch { dir: self.dir.clone(), differences }),
        }
    }

    /// Id of sample `index`; `None` past the end.
    pub fn id(&self, index: usize) -> Option<&str> {
        self.table.rows().get(index).map(|row| row.id.as_str())
    }

    /// Index of the sample with this id; `None` if there is none.
    pub fn index_of_id(&self, id: &str) -> Option<usize> {
        self.table.rows().iter().position(|row| row.id == id)
    }

    /// Number of tokens in sample `index`, without reading its hidden states; `None` past the end.
    pub fn length(&self, index: usize) -> Option<u32> {
        self.table.rows().get(index).map(|row| row.place.length)
    }

    /// Token ids of sample `index`, without reading its hidden states; `None` past the end.
    pub fn input_ids(&self, index: usize) -> Option<&[i32]> {
        self.table.rows().get(index).map(|row| self.table.input_ids(row))
    }

    /// Supervised spans of sample `index`, without reading its hidden states; `None` past the end.
    pub fn spans(&self, index: usize) -> Option<&[(u32, u32)]> {
        self.table.rows().get(index).map(|row| self.table.spans(row))
    }

    /// Positions of the final hidden states stored for sample `index`, ascending, without reading
    /// them.
    ///
    /// # Errors
    /// Fails if the sample does not exist.
    pub fn last_positions(&self, index: usize) -> Result<Vec<u32>, CacheError> {
        let row = self.row(index)?;
        Ok(self.layout.last.kept_positions(&loss_mask(row.place.length, self.table.spans(row))))
    }

    /// Sample `index` in plan order. Its checksum is verified only on first read, so later epochs
    /// read at memory speed.
    ///
    /// # Errors
    /// Fails if the sample does not exist, or if its bytes are damaged. That error names shard,
    /// sample, found and expected checksum.
    pub fn sample(&self, index: usize) -> Result<Sample<'_>, CacheError> {
        let row = self.row(index)?;
        let stored = self.verified_parts(index, row)?;
        Ok(Sample {
            row,
            id: &row.id,
            shard: row.place.shard,
            input_ids: self.table.input_ids(row),
            spans: self.table.spans(row),
            taps: stored.taps,
            last: stored.last,
            stored,
            layout: &self.layout,
        })
    }

    /// Sizes in bytes of the two buffers that [`Self::read_into`] fills: `[L, m·d]` and `[K, d]` in
    /// bfloat16.
    ///
    /// # Errors
    /// Fails if the sample does not exist.
    pub fn state_bytes(&self, index: usize) -> Result<[usize; 2], CacheError> {
        let row = self.row(index)?;
        Ok(codec::state_bytes(&self.layout, self.shards[row.place.shard].sample(row.place.rows())))
    }

    /// Copies the states of sample `index` to the caller's memory as bfloat16, decoding other
    /// encodings. Checks the bytes like [`Self::sample`]; bfloat16 is checked during the copy,
    /// block by block, so memory is read once. Up to [`MAX_MAPPED_BYTES`] bytes of shards stay mapped.
    /// After an error the memory has undefined content.
    ///
    /// # Errors
    /// As [`Self::sample`]; also fails if the memory does not have the size of
    /// [`Self::state_bytes`].
    pub fn read_into(&self, index: usize, taps: &mut [u8], last: &mut [u8]) -> Result<(), CacheError> {
        let row = self.row(index)?;
        let sizes = [(Part::Taps, taps.len()), (Part::Last, last.len())].into_iter();
        for ((part, found), expected) in sizes.zip(self.state_bytes(index)?) {
            if found != expected {
                let (sample, expected) = (row.id.clone(), expected as u64);
                return Err(CacheError::WrongSize { sample, part, found, expected });
            }
        }
        let shard = &self.shards[row.place.shard];
        if self.layout.encoding == Encoding::Bf16 && !self.is_verified(index) {
            let found = codec::copy_with_checksum(shard.sample(row.place.rows()), [taps, last]);
            check_checksum(shard, row, found)?;
            self.mark_verified(index);
        } else {
            let stored = self.verified_parts(index, row)?;
            codec::decode(&self.layout, stored, [taps, last]).map_err(row.decompress_error())?;
        }
        self.release_pages_at_limit(row);
        Ok(())
    }

    /// Counts the pages that a copied sample has mapped, and releases all at [`MAX_MAPPED_BYTES`] bytes.
    fn release_pages_at_limit(&self, row: &Row) {
        let mut touched = self.touched.lock().unwrap_or_else(PoisonError::into_inner);
        touched.bytes += self.shards[row.place.shard].page_bytes(row.place.rows());
        touched.shards.insert(row.place.shard);
        if touched.bytes >= MAX_MAPPED_BYTES {
            let TouchedPages { shards, .. } = std::mem::take(&mut *touched);
            shards.into_iter().for_each(|shard| self.shards[shard].release_pages());
        }
    }

    fn row(&self, index: usize) -> Result<&Row, CacheError> {
        self.table.rows().get(index).ok_or(CacheError::NoSuchSample { index, len: self.len() })
    }

    /// The stored bytes of a sample. The checksum is verified on first read.
    fn verified_parts(&self, index: usize, row: &Row) -> Result<Parts<&[u8]>, CacheError> {
        let shard = &self.shards[row.place.shard];
        if self.is_verified(index) {
            return Ok(shard.sample(row.place.rows()));
        }
        let stored = read_checked_parts(shard, row)?;
        self.mark_verified(index);
        Ok(stored)
    }

    fn is_verified(&self, index: usize) -> bool {
        self.seen[index / 64].load(Ordering::Relaxed) >> (index % 64) & 1 == 1
    }

    fn mark_verified(&self, index: usize) {
        self.seen[index / 64].fetch_or(1 << (index % 64), Ordering::Relaxed);
    }
}

/// The stored bytes of a sample, if their checksum matches.
pub(crate) fn read_checked_parts<'s>(
    shard: &'s MappedShard,
    row: &Row,
) -> Result<Parts<&'s [u8]>, CacheError> {
    let stored = shard.sample(row.place.rows());
    check_checksum(shard, row, codec::checksum(stored))?;
    Ok(stored)
}

fn check_checksum(shard: &MappedShard, row: &Row, found: u32) -> Result<(), CacheError> {
    let (path, sample, expected) = (shard.path().to_path_buf(), row.id.clone(), row.checksum);
    match found == expected {
        true => Ok(()),
        false => Err(CacheError::Checksum { path, sample, found, expected }),
    }
}

/// One sample of a cache, whose bytes are in the mapped file. L tokens, K final states, m taps, d
/// hidden size.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'r> {
    row: &'r Row,
    /// Id of the input row.
    pub id: &'r str,
    /// Number of the shard that has the sample.
    pub shard: usize,
    /// Token ids, L of them.
    pub input_ids: &'r [i32],
    /// Supervised tokens as half-open spans.
    pub spans: &'r [(u32, u32)],
    /// `[L, m·d]` as stored, row-major; bfloat16 at an even address.
    pub taps: &'r [u8],
    /// `[K, d]` as stored, row-major; bfloat16 at an even address.
    pub last: &'r [u8],
    stored: Parts<&'r [u8]>,
    layout: &'r Layout,
}

impl<'r> Sample<'r> {
    /// Number of tokens, L.
    pub fn len(&self) -> usize {
        self.input_ids.len()
    }

    /// Whether there are no tokens; a cached sample has at least one.
    pub fn is_empty(&self) -> bool {
        self.input_ids.is_empty()
    }

    /// One flag per token, `true` if it is supervised.
    pub fn loss_mask(&self) -> Vec<bool> {
        loss_mask(self.input_ids.len() as u32, self.spans)
    }

    /// The taps `[L, m·d]` and final states `[K, d]` in bfloat16: borrowed if stored in bfloat16,
    /// else decoded.
    ///
    /// # Errors
    /// Fails if the exponents cannot be decompressed.
    pub fn states(&self) -> Result<[Cow<'r, [u8]>; 2], CacheError> {
        codec::decode_to_bf16(self.layout, self.stored).map_err(self.row.decompress_error())
    }

    /// Which positions of the sample have their final hidden state stored.
    pub fn final_states(&self) -> FinalStates {
        self.layout.last
    }

    /// The shape of the rows.
    pub fn layout(&self) -> &'r Layout {
        self.layout
    }
}
