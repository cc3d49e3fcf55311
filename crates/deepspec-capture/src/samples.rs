//! Tokenised samples in a file that is shared by all processes of a machine and by all runs on
//! equal conversations.
//!
//! Layout, little-endian: eight bytes of magic, then one record per sample. A record has token ids
//! (4 bytes each), spans (two numbers of 4 bytes each), and the id as UTF-8. An index with 24 bytes
//! per sample ([`Entry`]) and a JSON summary ([`FileSummary`]) follow. The summary's length, the CRC-32
//! of index and summary, and the magic end the file, 8 bytes each. The file is mapped, so all its
//! readers share one copy in memory, and unread parts need no memory.

use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cache::{MappedFile, PlannedSample, page_bytes};
use serde::{Deserialize, Serialize};

use crate::{Rejected, RowCounts, StatesError};

mod entry;
mod identity;
mod share;
mod writer;

use entry::{Entry, checksum, u64_at};
use identity::SamplesIdentity;
pub(crate) use share::open_or_tokenise;

const MAGIC: &[u8; 8] = b"DSSAMPLE";
/// Bytes at the end of the file: length of the summary, checksum, magic.
const TAIL_BYTES: usize = 24;
/// Bytes of mapped records that stay in the process. The kernel's page cache may hold more.
const MAX_MAPPED_BYTES: u64 = 4 << 20;
/// Maximum number of unusable lines that the summary lists individually.
const MAX_NAMED_LINES: usize = 100;

/// A sample without its hidden states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleMeta<'d> {
    /// Id of the input row.
    pub id: Cow<'d, str>,
    /// Token ids.
    pub input_ids: Cow<'d, [i32]>,
    /// Supervised tokens as half-open spans.
    pub spans: Cow<'d, [(u32, u32)]>,
}

impl<'d> SampleMeta<'d> {
    pub(crate) fn of(sample: &'d PlannedSample) -> Self {
        Self {
            id: Cow::Borrowed(&sample.id),
            input_ids: Cow::Borrowed(&sample.input_ids),
            spans: Cow::Borrowed(&sample.spans),
        }
    }
}

/// The memory-mapped samples of files.
#[derive(Debug)]
pub struct Samples {
    file: MappedFile,
    /// Byte range of the index.
    index: Range<usize>,
    /// Counts of used and unused rows.
    report: RowCounts,
    /// Number of tokens in the longest sample.
    longest: usize,
    /// Bytes of pages mapped since the last release.
    touched: AtomicU64,
}

/// Why a file cannot be used.
pub(crate) enum SamplesOpenError {
    /// The file does not exist.
    Absent,
    /// The file was changed, or does not match its name.
    Damaged(String),
    /// The file cannot be read.
    Unreadable(StatesError),
}

/// Summary at the end of the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileSummary {
    identity: SamplesIdentity,
    /// Offset of the index.
    index: u64,
    rows: StoredRowCounts,
}

/// [`RowCounts`] with file numbers instead of paths, so that it is valid wherever the files are.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredRowCounts {
    read: usize,
    kept: usize,
    failed: usize,
    too_short: usize,
    rejected: usize,
    cut: usize,
    tokens: u64,
    supervised_tokens: u64,
    #[serde(default)]
    served: usize,
    #[serde(default)]
    served_otherwise: usize,
    /// File number, line and reason of the first unusable lines.
    named: Vec<(usize, usize, String)>,
}

impl Samples {
    /// Maps the file at `path` and checks all of it: the identity and every checksum. `inputs` are
    /// the files that it was made from.
    fn open(path: &Path, identity: &SamplesIdentity, inputs: &[PathBuf]) -> Result<Self, SamplesOpenError> {
        let file = MappedFile::open(path).map_err(|error| match error.source.kind() {
            io::ErrorKind::NotFound => SamplesOpenError::Absent,
            _ => SamplesOpenError::Unreadable(StatesError::Unwritable(error)),
        })?;
        let (account, index) = read_summary(file.bytes())?;
        if account.identity != *identity {
            return Err(damaged_error("it holds the samples of other conversations or rules"));
        }
        let (report, touched) = (account.rows.report(inputs), AtomicU64::new(0));
        let mut samples = Self { file, index, report, longest: 0, touched };
        samples.check(account.index)?;
        Ok(samples)
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.index.len() / Entry::BYTES
    }

    /// Counts of used and unused rows.
    pub fn report(&self) -> &RowCounts {
        &self.report
    }

    /// Number of tokens in the longest sample.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Number of tokens in sample `index`, which must be below [`Self::len`].
    pub fn length(&self, index: usize) -> usize {
        self.entry(index).tokens as usize
    }

    /// Id, token ids and spans of sample `index`, which must be below [`Self::len`].
    pub fn meta(&self, index: usize) -> SampleMeta<'static> {
        let PlannedSample { id, input_ids, spans } = self.planned_sample(index);
        SampleMeta { id: Cow::Owned(id), input_ids: Cow::Owned(input_ids), spans: Cow::Owned(spans) }
    }

    /// Sample `index`, which must be below [`Self::len`].
    pub fn planned_sample(&self, index: usize) -> PlannedSample {
        let entry = self.entry(index);
        let sample = entry.decode(self.sample_bytes(&entry).unwrap_or_default());
        self.release_pages(&entry);
        sample
    }

    /// Upper bound of the file's bytes that are mapped in this process.
    pub fn mapped_bytes(&self) -> u64 {
        (self.index.len() as u64 + MAX_MAPPED_BYTES).min(self.file.bytes().len() as u64)
    }

    fn entry(&self, index: usize) -> Entry {
        Entry::from_bytes(&self.file.bytes()[self.index.start + index * Entry::BYTES..][..Entry::BYTES])
    }

    fn sample_bytes(&self, entry: &Entry) -> Option<&[u8]> {
        let range = entry.record_range()?;
        self.file.bytes().get(usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?)
    }

    /// Counts the pages of a record that was read, and releases all at [`MAX_MAPPED_BYTES`] bytes.
    fn release_pages(&self, entry: &Entry) {
        let bytes = entry.record_range().map_or(0, page_bytes);
        if self.touched.fetch_add(bytes, Ordering::Relaxed) + bytes >= MAX_MAPPED_BYTES {
            self.touched.store(0, Ordering::Relaxed);
            self.file.release_pages();
        }
    }

    /// Checks every record: the records must be contiguous up to `end` and match their checksums.
    fn check(&mut self, end: u64) -> Result<(), SamplesOpenError> {
        let (mut place, mut tokens, mut supervised) = (MAGIC.len() as u64, 0, 0);
        for index in 0..self.len() {
            let entry = self.entry(index);
            let record = self.sample_bytes(&entry).filter(|_| entry.offset == place);
            let Some(record) = record else {
                return Err(damaged_error(&format!("sample {index} lies outside it")));
            };
            if checksum(&[record]) != entry.checksum {
                return Err(damaged_error(&format!("sample {index} is not what was written")));
            }
            let sample = entry.decode(record);
            sample.check().map_err(|error| damaged_error(&error.to_string()))?;
            place += record.len() as u64;
            tokens += u64::from(entry.tokens);
            supervised += u64::from(sample.supervised_count());
            self.longest = self.longest.max(entry.tokens as usize);
            self.release_pages(&entry);
        }
        let counted = (self.len(), tokens, supervised);
        if place != end || counted != (self.report.kept, self.report.tokens, self.report.supervised_tokens) {
            return Err(damaged_error("its samples are not those of its account"));
        }
        Ok(())
    }
}

impl StoredRowCounts {
    /// Converts `report`, whose lines are in the files `inputs`.
    fn of(report: &RowCounts, inputs: &[PathBuf]) -> Self {
        let named = report.rejected.iter().take(MAX_NAMED_LINES).map(|rejected| {
            let file = inputs.iter().position(|input| *input == rejected.file);
            (file.unwrap_or_default(), rejected.line, rejected.reason.clone())
        });
        Self {
            read: report.read,
            kept: report.kept,
            failed: report.failed,
            too_short: report.too_short,
            rejected: report.rejected(),
            cut: report.cut,
            tokens: report.tokens,
            supervised_tokens: report.supervised_tokens,
            served: report.served,
            served_otherwise: report.served_otherwise,
            named: named.collect(),
        }
    }

    fn report(self, inputs: &[PathBuf]) -> RowCounts {
        let unnamed = self.rejected.saturating_sub(self.named.len());
        let named = self.named.into_iter().map(|(file, line, reason)| Rejected {
            file: inputs.get(file).cloned().unwrap_or_default(),
            line,
            reason,
        });
        RowCounts {
            read: self.read,
            kept: self.kept,
            failed: self.failed,
            too_short: self.too_short,
            rejected: named.collect(),
            unnamed,
            cut: self.cut,
            tokens: self.tokens,
            supervised_tokens: self.supervised_tokens,
            served: self.served,
            served_otherwise: self.served_otherwise,
        }
    }
}

/// The summary of a file with these bytes, and the range of its index.
fn read_summary(bytes: &[u8]) -> Result<(FileSummary, Range<usize>), SamplesOpenError> {
    let torn = || damaged_error("its end is missing");
    let tail =
        bytes.len().checked_sub(TAIL_BYTES).filter(|_| bytes.starts_with(MAGIC) && bytes.ends_with(MAGIC));
    let tail = tail.ok_or_else(torn)?;
    let length = u64_at(bytes, tail).and_then(|length| usize::try_from(length).ok());
    let start = length.and_then(|length| tail.checked_sub(length)).ok_or_else(torn)?;
    let account: FileSummary = serde_json::from_slice(&bytes[start..tail])
        .map_err(|error| damaged_error(&format!("its account cannot be read: {error}")))?;
    let index = usize::try_from(account.index).ok().filter(|&index| index >= MAGIC.len() && index <= start);
    let index = index.filter(|index| (start - index) % Entry::BYTES == 0).ok_or_else(torn)?;
    if u64_at(bytes, tail + 8) != Some(u64::from(checksum(&[&bytes[index..tail]]))) {
        return Err(damaged_error("its index is not what was written"));
    }
    Ok((account, index..start))
}

fn damaged_error(problem: &str) -> SamplesOpenError {
    SamplesOpenError::Damaged(problem.to_string())
}
