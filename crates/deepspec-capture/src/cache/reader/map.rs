//! Files in memory: the one room of this crate where `unsafe` is allowed.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::FileError;
use memmap2::{Mmap, UncheckedAdvice};

use crate::cache::error::CacheError;
use crate::cache::files::ShardEntry;
use crate::cache::layout::Layout;
use crate::cache::shard::{self, Geometry, Parts, Rows};

/// Characters of a wrong header that a message shows.
const SHOWN: usize = 200;

/// A file in memory, read-only. Only for files that appear whole under their name and are never written to again: whoever makes
/// them writes them aside and moves them into place, and replaces them, if ever, by removing them first.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// If it cannot be opened or mapped.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let file = File::open(path).map_err(FileError::at("opening", path))?;
        let map = map(&file).map_err(FileError::at("mapping", path))?;
        Ok(Self { path: path.to_path_buf(), map })
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Takes all pages out of this process again; those in use come back by themselves.
    pub fn let_go(&self) {
        release(&self.map);
    }
}

/// A mapped shard whose size and header are those of the manifest.
#[derive(Debug)]
pub(crate) struct MappedShard {
    file: MappedFile,
    geometry: Geometry,
}

impl MappedShard {
    /// Maps shard `index` of the cache in `dir`.
    pub fn open(dir: &Path, layout: &Layout, index: usize, entry: &ShardEntry) -> Result<Self, CacheError> {
        let path = shard::path(dir, index);
        let expected = entry.bytes;
        let geometry = Geometry::of(layout, entry)?;
        let file = MappedFile::open(&path)?;
        let found = file.bytes().len() as u64;
        let geometry = geometry.filter(|_| found == expected);
        let Some(geometry) = geometry else { return Err(CacheError::Size { path, found, expected }) };
        let (bytes, header) = (file.bytes(), geometry.header());
        match bytes.get(..header.len()) {
            Some(found) if found == header => Ok(Self { file, geometry }),
            found => {
                let (found, expected) = (shown(found.unwrap_or(bytes)), shown(header));
                Err(CacheError::ShardHeader { path, found, expected })
            }
        }
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        self.file.bytes()
    }

    /// The stored bytes of a sample; empty past the end, which the samples' table has ruled out.
    pub fn sample(&self, rows: Rows) -> Parts<&[u8]> {
        self.geometry.sample(rows).map(|range| self.slice(range))
    }

    /// Bytes of the pages that reading a sample brings into the process at most.
    pub fn faulted(&self, rows: Rows) -> u64 {
        self.geometry.sample(rows).in_order().into_iter().map(faulted).sum()
    }

    /// Takes all pages out of this process again; those in use come back by themselves.
    pub fn let_go(&self) {
        self.file.let_go();
    }

    fn slice(&self, range: Range<u64>) -> &[u8] {
        self.bytes().get(range.start as usize..range.end as usize).unwrap_or_default()
    }
}

/// Bytes of the pages that reading a range of a mapped file brings into the process at most: a fault brings its neighbours along.
pub fn faulted(range: Range<u64>) -> u64 {
    /// What the kernel maps around a fault, aligned (`fault_around_bytes`).
    const AROUND: u64 = 64 << 10;
    if range.is_empty() { 0 } else { range.end.next_multiple_of(AROUND) - range.start / AROUND * AROUND }
}

/// A header as text, cut short.
fn shown(header: &[u8]) -> String {
    String::from_utf8_lossy(header.get(8..).unwrap_or_default()).trim_end().chars().take(SHOWN).collect()
}

#[expect(unsafe_code)]
fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: a map is sound while nobody changes or shortens the file behind it. This one is read-only, and the file is
    // a published one, which this project never opens for writing: shards of a cache and files of tokenised samples are
    // written under another name and moved into place whole, and who replaces one unlinks it, which leaves the mapped
    // pages alive. Only a foreign program that writes into a published file could break this; bytes changed before a
    // read are caught by the checksum.
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
