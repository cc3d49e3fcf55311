//! Writes a sequential range of a file in large aligned pieces.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of a piece. The kernel caches a piece that is written at once in one large page. With
/// small pages, the first read of a new cache took half as long again.
const PIECE_BYTES: u64 = 2 << 20;

/// A range of a file that is written sequentially.
#[derive(Debug)]
pub(crate) struct PieceWriter {
    /// File offset of `pending`.
    at: u64,
    pending: Vec<u8>,
}

impl PieceWriter {
    /// A range that begins at `start`.
    pub fn from(start: u64) -> Self {
        Self { at: start, pending: Vec::new() }
    }

    /// Appends `bytes`; they are written once their piece is complete.
    pub fn push(&mut self, file: &File, mut bytes: &[u8]) -> io::Result<()> {
        loop {
            let end = self.at + self.pending.len() as u64;
            let room = (PIECE_BYTES - end % PIECE_BYTES) as usize;
            let Some((now, rest)) = bytes.split_at_checked(room) else {
                self.pending.extend_from_slice(bytes);
                return Ok(());
            };
            self.pending.extend_from_slice(now);
            self.flush(file)?;
            bytes = rest;
        }
    }

    /// Writes the pending bytes.
    pub fn flush(&mut self, file: &File) -> io::Result<()> {
        file.write_all_at(&self.pending, self.at)?;
        self.at += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }
}
