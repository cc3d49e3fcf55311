//! Shards in memory: the one room of this crate where `unsafe` is allowed.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::FileError;
use memmap2::{Mmap, UncheckedAdvice};

use crate::error::CacheError;
use crate::layout::Layout;
use crate::manifest::ShardEntry;
use crate::shard::{self, Geometry, Parts, Rows};

/// Characters of a wrong header that a message shows.
const SHOWN: usize = 200;

/// A mapped shard whose size and header are those of the manifest.
#[derive(Debug)]
pub(crate) struct MappedShard {
    path: PathBuf,
    map: Mmap,
    geometry: Geometry,
}

impl MappedShard {
    /// Maps shard `index` of the cache in `dir`.
    pub fn open(dir: &Path, layout: &Layout, index: usize, entry: &ShardEntry) -> Result<Self, CacheError> {
        let path = shard::path(dir, index);
        let expected = entry.bytes;
        let geometry = Geometry::of(layout, entry)?;
        let file = File::open(&path).map_err(FileError::at("opening", &path))?;
        let found = file.metadata().map_err(FileError::at("reading", &path))?.len();
        let geometry = geometry.filter(|_| found == expected);
        let Some(geometry) = geometry else { return Err(CacheError::Size { path, found, expected }) };
        let map = map(&file).map_err(FileError::at("mapping", &path))?;
        let shard = Self { path, map, geometry };
        let header = shard.geometry.header();
        match shard.map.get(..header.len()) {
            Some(found) if found == header => Ok(shard),
            found => {
                let (found, expected) = (shown(found.unwrap_or(&shard.map)), shown(header));
                Err(CacheError::ShardHeader { path: shard.path, found, expected })
            }
        }
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// The stored bytes of a sample; empty past the end, which the samples' table has ruled out.
    pub fn sample(&self, rows: Rows) -> Parts<&[u8]> {
        self.geometry.sample(rows).map(|range| self.slice(range))
    }

    /// Bytes of the pages that reading a sample brings into the process at most: a fault brings its neighbours along.
    pub fn faulted(&self, rows: Rows) -> u64 {
        /// What the kernel maps around a fault, aligned (`fault_around_bytes`).
        const AROUND: u64 = 64 << 10;
        let ranges = self.geometry.sample(rows).in_order().into_iter().filter(|range| !range.is_empty());
        ranges.map(|range| range.end.next_multiple_of(AROUND) - range.start / AROUND * AROUND).sum()
    }

    /// Takes all pages out of this process again; those in use come back by themselves.
    pub fn let_go(&self) {
        release(&self.map);
    }

    fn slice(&self, range: Range<u64>) -> &[u8] {
        self.map.get(range.start as usize..range.end as usize).unwrap_or_default()
    }
}

/// A header as text, cut short.
fn shown(header: &[u8]) -> String {
    String::from_utf8_lossy(header.get(8..).unwrap_or_default()).trim_end().chars().take(SHOWN).collect()
}

#[expect(unsafe_code)]
fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: a map is sound while nobody changes or shortens the file behind it. This one is read-only, and the file is
    // a published shard, which this project never opens for writing: shards are written under another name and renamed
    // into place whole, and `remove_existing` unlinks them, which leaves the mapped pages alive. Only a foreign program
    // that writes into a published cache could break this; bytes changed before a read are caught by the checksum.
    unsafe { Mmap::map(file) }
}

#[expect(unsafe_code)]
fn release(map: &Mmap) {
    // SAFETY: the map is one of a file, shared and never written through, so pages that are let go come back from the file
    // with the bytes that they had: references into them, of this thread or another, see no change.
    let released = unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) };
    // A system that refuses keeps the pages, as it would have without being asked.
    drop(released);
}
