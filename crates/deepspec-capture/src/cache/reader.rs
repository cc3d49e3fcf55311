//! Reads a finished cache: maps its shards, hands out samples without copying, checks each one the first time it is read.

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

/// Bytes of mapped shards that [`Reader::read_into`] leaves in the process. The system's page cache keeps all it has room for; without
/// a limit of our own a run would seem to take as much memory as its cache has bytes. To let pages go sample by sample costs more
/// than to copy a small one.
pub const PAGES_KEPT: u64 = 128 << 20;

/// A finished cache, open for reading from any number of threads.
#[derive(Debug)]
pub struct Reader {
    dir: PathBuf,
    manifest: Manifest,
    layout: Layout,
    table: Table,
    shards: Vec<MappedShard>,
    /// One bit a sample: whether this reader has found its bytes to be what was written.
    seen: Vec<AtomicU64>,
    /// Since pages were last let go.
    touched: Mutex<Touched>,
}

/// What reads have left in the process since it was last let go.
#[derive(Debug, Default)]
struct Touched {
    bytes: u64,
    shards: BTreeSet<usize>,
}

impl Reader {
    /// Opens the cache in `dir`: reads the manifest and the samples' table whole, checks their digests, and checks every
    /// shard's size and header. The shards' data is checked sample by sample when it is read.
    ///
    /// # Errors
    /// No cache there, or anything in it that is not what was written; the message names the file.
    pub fn open(dir: &Path) -> Result<Self, CacheError> {
        let manifest = Manifest::read(dir)?;
        let layout = manifest.layout();
        let table = Table::read(dir, &manifest)?;
        let open = |(index, entry)| MappedShard::open(dir, &layout, index, entry);
        let shards = manifest.shards.iter().enumerate().map(open).collect::<Result<_, _>>()?;
        let seen = (0..table.rows().len().div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { dir: dir.to_path_buf(), manifest, layout, table, shards, seen, touched: Mutex::default() })
    }

    /// What the cache says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The shape of the rows.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Samples.
    pub fn len(&self) -> usize {
        self.table.rows().len()
    }

    /// Whether there are no samples; a published cache has at least one.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Refuses a cache that was made for something else.
    ///
    /// # Errors
    /// The fields that differ, with both values.
    pub fn require(&self, wanted: &Identity) -> Result<(), CacheError> {
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

    /// The index of the sample with this id.
    pub fn position(&self, id: &str) -> Option<usize> {
        self.table.rows().iter().position(|row| row.id == id)
    }

    /// Tokens of sample `index`, without touching its hidden states; `None` past the end.
    pub fn length(&self, index: usize) -> Option<u32> {
        self.table.rows().get(index).map(|row| row.place.length)
    }

    /// Token ids of sample `index`, without touching its hidden states; `None` past the end.
    pub fn input_ids(&self, index: usize) -> Option<&[i32]> {
        self.table.rows().get(index).map(|row| self.table.input_ids(row))
    }

    /// Supervised spans of sample `index`, without touching its hidden states; `None` past the end.
    pub fn spans(&self, index: usize) -> Option<&[(u32, u32)]> {
        self.table.rows().get(index).map(|row| self.table.spans(row))
    }

    /// The positions whose last states sample `index` keeps, ascending, without touching its hidden states.
    ///
    /// # Errors
    /// No such sample.
    pub fn last_positions(&self, index: usize) -> Result<Vec<u32>, CacheError> {
        let row = self.row(index)?;
        Ok(self.layout.last.positions(&loss_mask(row.place.length, self.table.spans(row))))
    }

    /// Sample `index` in plan order, its bytes checked against its checksum the first time that this reader hands it
    /// out: later epochs run at the memory's speed.
    ///
    /// # Errors
    /// No such sample; damaged bytes, with shard, sample, found and expected checksum.
    pub fn sample(&self, index: usize) -> Result<Sample<'_>, CacheError> {
        let row = self.row(index)?;
        let stored = self.stored(index, row)?;
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

    /// Bytes that [`Self::read_into`] fills: of `[L, m·d]` and of `[K, d]` in bfloat16.
    ///
    /// # Errors
    /// No such sample.
    pub fn state_bytes(&self, index: usize) -> Result<[usize; 2], CacheError> {
        let row = self.row(index)?;
        Ok(codec::state_bytes(&self.layout, self.shards[row.place.shard].sample(row.place.rows())))
    }

    /// Copies the states of sample `index` into the caller's memory as bfloat16, whatever they are stored in. Its bytes
    /// are checked as [`Self::sample`] does; bfloat16 on its way, block by block, so that memory is read once for
    /// both. Pages of the shards stay in the process up to [`PAGES_KEPT`]. After an error the memory holds nothing of use.
    ///
    /// # Errors
    /// As [`Self::sample`]; memory of another size than [`Self::state_bytes`].
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
        if self.layout.encoding == Encoding::Bf16 && !self.seen(index) {
            let found = codec::copy(shard.sample(row.place.rows()), [taps, last]);
            compare(shard, row, found)?;
            self.mark_seen(index);
        } else {
            let stored = self.stored(index, row)?;
            codec::decode(&self.layout, stored, [taps, last]).map_err(row.undecodable())?;
        }
        self.let_go(row);
        Ok(())
    }

    /// Counts what a copied sample has left of the shards in this process, and lets all of it go when it is [`PAGES_KEPT`].
    fn let_go(&self, row: &Row) {
        let mut touched = self.touched.lock().unwrap_or_else(PoisonError::into_inner);
        touched.bytes += self.shards[row.place.shard].faulted(row.place.rows());
        touched.shards.insert(row.place.shard);
        if touched.bytes >= PAGES_KEPT {
            let Touched { shards, .. } = std::mem::take(&mut *touched);
            shards.into_iter().for_each(|shard| self.shards[shard].let_go());
        }
    }

    fn row(&self, index: usize) -> Result<&Row, CacheError> {
        self.table.rows().get(index).ok_or(CacheError::NoSuchSample { index, len: self.len() })
    }

    /// The bytes of a row, checked the first time.
    fn stored(&self, index: usize, row: &Row) -> Result<Parts<&[u8]>, CacheError> {
        let shard = &self.shards[row.place.shard];
        if self.seen(index) {
            return Ok(shard.sample(row.place.rows()));
        }
        let stored = checked(shard, row)?;
        self.mark_seen(index);
        Ok(stored)
    }

    fn seen(&self, index: usize) -> bool {
        self.seen[index / 64].load(Ordering::Relaxed) >> (index % 64) & 1 == 1
    }

    fn mark_seen(&self, index: usize) {
        self.seen[index / 64].fetch_or(1 << (index % 64), Ordering::Relaxed);
    }
}

/// The stored bytes of a row, if they are what was written.
pub(crate) fn checked<'s>(shard: &'s MappedShard, row: &Row) -> Result<Parts<&'s [u8]>, CacheError> {
    let stored = shard.sample(row.place.rows());
    compare(shard, row, codec::checksum(stored))?;
    Ok(stored)
}

fn compare(shard: &MappedShard, row: &Row, found: u32) -> Result<(), CacheError> {
    let (path, sample, expected) = (shard.path().to_path_buf(), row.id.clone(), row.checksum);
    match found == expected {
        true => Ok(()),
        false => Err(CacheError::Checksum { path, sample, found, expected }),
    }
}

/// One sample of a cache; its bytes lie in the mapped file. L tokens, K kept last states, m taps, d hidden size.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'r> {
    row: &'r Row,
    /// The input row's id.
    pub id: &'r str,
    /// Number of its shard.
    pub shard: usize,
    /// Token ids, L of them.
    pub input_ids: &'r [i32],
    /// Supervised tokens as half-open spans.
    pub spans: &'r [(u32, u32)],
    /// `[L, m·d]` as the shard has them, row-major; bfloat16 at an even address.
    pub taps: &'r [u8],
    /// `[K, d]` as the shard has them, row-major; bfloat16 at an even address.
    pub last: &'r [u8],
    stored: Parts<&'r [u8]>,
    layout: &'r Layout,
}

impl<'r> Sample<'r> {
    /// Tokens, L.
    pub fn len(&self) -> usize {
        self.input_ids.len()
    }

    /// Whether there are no tokens; a cached sample has at least one.
    pub fn is_empty(&self) -> bool {
        self.input_ids.is_empty()
    }

    /// One flag per token, `true` where it is supervised.
    pub fn loss_mask(&self) -> Vec<bool> {
        loss_mask(self.input_ids.len() as u32, self.spans)
    }

    /// `[L, m·d]` and `[K, d]` in bfloat16: the mapped bytes themselves where they are stored so, else decoded ones.
    ///
    /// # Errors
    /// Exponents that cannot be decompressed.
    pub fn states(&self) -> Result<[Cow<'r, [u8]>; 2], CacheError> {
        codec::decoded(self.layout, self.stored).map_err(self.row.undecodable())
    }

    /// Which last states the cache keeps.
    pub fn kept(&self) -> FinalStates {
        self.layout.last
    }

    /// The shape of the rows.
    pub fn layout(&self) -> &'r Layout {
        self.layout
    }
}
