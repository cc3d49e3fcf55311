//! Writes a growing range of a file in large aligned pieces.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of a piece. The kernel keeps what arrives at once in one large page; a map of small pages faults so much more often
/// that reading a fresh cache took half as long again.
const PIECE: u64 = 2 << 20;

/// A range of a file that is written from front to back.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// Where `pending` belongs.
    at: u64,
    pending: Vec<u8>,
}

impl Pieces {
    /// A range from `start` on.
    pub fn from(start: u64) -> Self {
        Self { at: start, pending: Vec::new() }
    }

    /// Appends `bytes`, which reach the file once their piece is whole.
    pub fn push(&mut self, file: &File, mut bytes: &[u8]) -> io::Result<()> {
        loop {
            let end = self.at + self.pending.len() as u64;
            let room = (PIECE - end % PIECE) as usize;
            let Some((now, rest)) = bytes.split_at_checked(room) else {
                self.pending.extend_from_slice(bytes);
                return Ok(());
            };
            self.pending.extend_from_slice(now);
            self.flush(file)?;
            bytes = rest;
        }
    }

    /// Writes what is pending.
    pub fn flush(&mut self, file: &File) -> io::Result<()> {
        file.write_all_at(&self.pending, self.at)?;
        self.at += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }
}
