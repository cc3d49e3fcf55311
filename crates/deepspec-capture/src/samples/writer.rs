//! Writes tokenised samples one by one without keeping them in memory.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::cache::PlannedSample;
use deepspec_core::atomic::FileError;

use super::{Entry, FileSummary, MAGIC, SamplesIdentity, StoredRowCounts, checksum};
use crate::{RowCounts, StatesError};

/// A file that is being written. It is removed if dropped before publication. After a kill it
/// remains, and the next writer removes it.
pub(super) struct SamplesWriter {
    file: BufWriter<File>,
    path: PathBuf,
    /// Offset of the next record.
    offset: u64,
    /// Index entries so far, the only data of samples in memory.
    index: Vec<u8>,
}

impl SamplesWriter {
    /// Creates a new file at the first free name of `name(0)`, `name(1)`, …
    pub fn create(name: impl Fn(usize) -> PathBuf) -> Result<Self, StatesError> {
        let mut tries = 0;
        let (file, path) = loop {
            let path = name(tries);
            match File::create_new(&path) {
                Ok(file) => break (file, path),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => tries += 1,
                Err(error) => return Err(unwritable_error("creating", &path)(error)),
            }
        };
        let mut writer =
            Self { file: BufWriter::with_capacity(1 << 20, file), path, offset: 0, index: Vec::new() };
        writer.write(MAGIC)?;
        Ok(writer)
    }

    /// Appends a sample.
    pub fn push(&mut self, sample: &PlannedSample) -> Result<(), StatesError> {
        sample.check()?;
        let (entry, record) = Entry::encode(sample, self.offset).ok_or_else(|| {
            let problem = format!("sample {:?} is longer than a file of samples can say", sample.id);
            StatesError::Recipe { key: "data.input", problem }
        })?;
        self.index.extend(entry.to_bytes());
        self.write(&record)
    }

    /// Completes the file and publishes it as `path`, unless another process was faster; that file
    /// is equivalent.
    pub fn publish(
        mut self,
        path: &Path,
        identity: SamplesIdentity,
        report: &RowCounts,
        inputs: &[PathBuf],
    ) -> Result<(), StatesError> {
        let account = FileSummary { identity, index: self.offset, rows: StoredRowCounts::of(report, inputs) };
        // A summary is plain data, which always serializes.
        let account = serde_json::to_vec(&account).unwrap_or_default();
        let sum = checksum(&[&self.index, &account]);
        let index = std::mem::take(&mut self.index);
        let length = account.len() as u64;
        for part in [&index[..], &account, &length.to_le_bytes(), &u64::from(sum).to_le_bytes(), MAGIC] {
            self.write(part)?;
        }
        let synced = self.file.flush().and_then(|()| self.file.get_ref().sync_all());
        synced.map_err(unwritable_error("writing", &self.path))?;
        publish_if_absent(&self.path, path).map_err(unwritable_error("writing", path))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), StatesError> {
        self.file.write_all(bytes).map_err(unwritable_error("writing", &self.path))?;
        self.offset += bytes.len() as u64;
        Ok(())
    }
}

impl Drop for SamplesWriter {
    fn drop(&mut self) {
        // After publication this name no longer exists.
        let _ = fs::remove_file(&self.path);
    }
}

fn unwritable_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StatesError {
    let at = FileError::at(action, path);
    move |error| StatesError::Unwritable(at(error))
}

/// Publishes a file under a name. An existing file of this name is kept, because other machines may
/// have mapped it, and on some network file systems they would lose the mapping. Only a file system
/// without hard links replaces it.
fn publish_if_absent(partial: &Path, path: &Path) -> io::Result<()> {
    match fs::hard_link(partial, path) {
        Ok(()) => fs::remove_file(partial),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => fs::remove_file(partial),
        // The file system does not support hard links. Renaming replaces an existing file.
        Err(_) => fs::rename(partial, path),
    }
}
