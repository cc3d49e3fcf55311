//! Memory-mapped files. `unsafe` is allowed only in this module of the crate.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::FileError;
use memmap2::{Mmap, UncheckedAdvice};

use crate::cache::error::CacheError;
use crate::cache::files::ShardEntry;
use crate::cache::layout::Layout;
use crate::cache::shard::{self, Geometry, Parts, SampleExtent};

/// Characters of a wrong header that are printed in a message.
const MAX_SHOWN_CHARS: usize = 200;

/// A read-only memory map of a file. The file must be complete and never change. Its writer must
/// write it under another name, move it into place, and remove it before any replacement.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// Fails if the file cannot be opened or mapped.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let file = File::open(path).map_err(FileError::at("opening", path))?;
        let map = map_file(&file).map_err(FileError::at("mapping", path))?;
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

    /// Unmaps all pages from this process; later accesses load them again.
    pub fn release_pages(&self) {
        release_all_pages(&self.map);
    }
}

/// A mapped shard whose size and header match the manifest.
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
        let geometry = Geometry::from_entry(layout, entry)?;
        let file = MappedFile::open(&path)?;
        let found = file.bytes().len() as u64;
        let geometry = geometry.filter(|_| found == expected);
        let Some(geometry) = geometry else { return Err(CacheError::Size { path, found, expected }) };
        let (bytes, header) = (file.bytes(), geometry.header());
        match bytes.get(..header.len()) {
            Some(found) if found == header => Ok(Self { file, geometry }),
            found => {
                let (found, expected) =
                    (header_for_message(found.unwrap_or(bytes)), header_for_message(header));
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

    /// The stored bytes of a sample; empty past the end, which the samples' table excludes.
    pub fn sample(&self, rows: SampleExtent) -> Parts<&[u8]> {
        self.geometry.sample(rows).map(|range| self.slice(range))
    }

    /// Upper bound of the bytes that reading a sample maps into the process.
    pub fn page_bytes(&self, rows: SampleExtent) -> u64 {
        self.geometry.sample(rows).in_file_order().into_iter().map(page_bytes).sum()
    }

    /// Unmaps all pages from this process; later accesses load them again.
    pub fn release_pages(&self) {
        self.file.release_pages();
    }

    fn slice(&self, range: Range<u64>) -> &[u8] {
        self.bytes().get(range.start as usize..range.end as usize).unwrap_or_default()
    }
}

/// Upper bound of the bytes that reading a range maps into the process. A page fault also maps
/// neighbouring pages.
pub fn page_bytes(range: Range<u64>) -> u64 {
    /// Aligned bytes that the kernel maps around a fault (`fault_around_bytes`).
    const FAULT_AROUND_BYTES: u64 = 64 << 10;
    if range.is_empty() {
        0
    } else {
        range.end.next_multiple_of(FAULT_AROUND_BYTES) - range.start / FAULT_AROUND_BYTES * FAULT_AROUND_BYTES
    }
}

/// A header as text, truncated.
fn header_for_message(header: &[u8]) -> String {
    String::from_utf8_lossy(header.get(8..).unwrap_or_default())
        .trim_end()
        .chars()
        .take(MAX_SHOWN_CHARS)
        .collect()
}

#[expect(unsafe_code)]
fn map_file(file: &File) -> io::Result<Mmap> {
    // SAFETY: a map is sound while the file behind it is neither changed nor truncated. This map is
    // read-only, and this project never opens published files for writing. Shards and files of
    // tokenised samples are written under another name and moved into place. A replacement unlinks
    // the old file first, which keeps the mapped pages alive. Only another program that writes into
    // a published file could break this. Bytes changed before a read are detected by the checksum.
    unsafe { Mmap::map(file) }
}

#[expect(unsafe_code)]
fn release_all_pages(map: &Mmap) {
    // SAFETY: the map is a shared, read-only map of a file. Released pages are loaded again from
    // the file with equal bytes, so references into them see no change.
    let released = unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) };
    // If the system refuses, the pages stay mapped.
    drop(released);
}
