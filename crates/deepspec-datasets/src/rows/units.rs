//! Splits a dataset into units, which are read in order and processed in parallel.

use std::path::Path;
use std::sync::Arc;
use std::vec;

use arrow_array::RecordBatch;
use deepspec_core::atomic::FileError;
use deepspec_core::jsonl::{RawLine, RawLines};

use crate::rows::array::ArrayElements;
use crate::rows::files::{DataFile, Format};
use crate::rows::table::{BATCH_BYTES, Batches, Table};

/// A worker decodes row groups up to this size as a whole; larger ones are read in batches.
const MAX_DECODED_GROUP_BYTES: usize = 4 * BATCH_BYTES;

/// Maximum number of lines per unit.
const MAX_LINES_PER_UNIT: usize = 4096;

/// Consecutive rows of one file.
pub enum Unit {
    /// Lines or array elements.
    Lines {
        /// File of the lines.
        file: Arc<Path>,
        /// The rows' text.
        lines: Vec<RawLine>,
    },
    /// Decoded columns.
    Batch {
        /// File of the rows.
        file: Arc<Path>,
        /// 1-based index of the first row.
        first: usize,
        /// The rows.
        batch: RecordBatch,
    },
    /// A row group that is not decoded yet.
    Group {
        /// File with the row group.
        table: Table,
        /// Index of the row group.
        group: usize,
        /// 1-based index of the first row.
        first: usize,
    },
}

impl Unit {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        match self {
            Self::Lines { lines, .. } => lines.len(),
            Self::Batch { batch, .. } => batch.num_rows(),
            Self::Group { table, group, .. } => table.group_rows(*group),
        }
    }

    /// The file of the rows.
    pub fn file(&self) -> &Arc<Path> {
        match self {
            Self::Lines { file, .. } | Self::Batch { file, .. } => file,
            Self::Group { table, .. } => table.path(),
        }
    }
}

/// Decodes a row group to batches, each with the 1-based index of its first row.
///
/// # Errors
/// Fails if the group is malformed, with the file and the row.
pub fn decode_row_group(
    table: &Table,
    group: usize,
    first: usize,
) -> anyhow::Result<Vec<(usize, RecordBatch)>> {
    let (mut batches, mut at) = (vec![], first);
    let mut reader = table.batches(group)?;
    while let Some(batch) = reader.next(at)? {
        let rows = batch.num_rows();
        batches.push((at, batch));
        at += rows;
    }
    let (found, expected) = (at - first, table.group_rows(group));
    anyhow::ensure!(
        found == expected,
        "{}: row group {group} holds {found} rows where the file says {expected}",
        table.path().display()
    );
    Ok(batches)
}

/// The file being read.
enum OpenFile {
    Lines(Arc<Path>, Box<dyn Iterator<Item = Result<RawLine, FileError>> + Send>),
    Table { table: Table, group: usize, row: usize, batches: Option<Batches> },
}

/// Iterates over a dataset's [`Unit`]s.
pub struct Units {
    files: vec::IntoIter<DataFile>,
    open: Option<OpenFile>,
}

impl Units {
    pub(super) fn new(files: Vec<DataFile>) -> Self {
        Self { files: files.into_iter(), open: None }
    }

    fn next_unit(&mut self) -> anyhow::Result<Option<Unit>> {
        loop {
            let unit = match &mut self.open {
                Some(OpenFile::Lines(file, lines)) => read_lines_unit(file, lines)?,
                Some(OpenFile::Table { table, group, row, batches }) => {
                    read_table_unit(table, group, row, batches)?
                }
                None => None,
            };
            if unit.is_some() {
                return Ok(unit);
            }
            match self.files.next() {
                Some(file) => self.open = Some(open(&file)?),
                None => return Ok(None),
            }
        }
    }
}

impl Iterator for Units {
    type Item = anyhow::Result<Unit>;

    fn next(&mut self) -> Option<Self::Item> {
        let unit = self.next_unit();
        if unit.is_err() {
            (self.open, self.files) = (None, vec![].into_iter());
        }
        unit.transpose()
    }
}

fn open(file: &DataFile) -> anyhow::Result<OpenFile> {
    let path = file.shared_path();
    Ok(match file.format() {
        Format::Parquet => OpenFile::Table { table: Table::open(path)?, group: 0, row: 1, batches: None },
        Format::Json if file.is_array()? => {
            OpenFile::Lines(Arc::clone(&path), Box::new(ArrayElements::open(&path)?))
        }
        Format::Json | Format::Lines => OpenFile::Lines(Arc::clone(&path), Box::new(RawLines::open(&path)?)),
    })
}

fn read_lines_unit(
    file: &Arc<Path>,
    source: &mut impl Iterator<Item = Result<RawLine, FileError>>,
) -> anyhow::Result<Option<Unit>> {
    let (mut lines, mut bytes) = (vec![], 0);
    while bytes < BATCH_BYTES && lines.len() < MAX_LINES_PER_UNIT {
        let Some(line) = source.next().transpose()? else { break };
        bytes += line.bytes.as_ref().map_or(0, Vec::len);
        lines.push(line);
    }
    Ok((!lines.is_empty()).then(|| Unit::Lines { file: Arc::clone(file), lines }))
}

fn read_table_unit(
    table: &Table,
    group: &mut usize,
    row: &mut usize,
    batches: &mut Option<Batches>,
) -> anyhow::Result<Option<Unit>> {
    loop {
        if let Some(reader) = batches {
            if let Some(batch) = reader.next(*row)? {
                let first = *row;
                *row += batch.num_rows();
                return Ok(Some(Unit::Batch { file: Arc::clone(table.path()), first, batch }));
            }
            *batches = None;
        }
        if *group == table.num_row_groups() {
            return Ok(None);
        }
        let (this, first) = (*group, *row);
        *group += 1;
        if table.group_bytes(this) <= MAX_DECODED_GROUP_BYTES {
            *row += table.group_rows(this);
            return Ok(Some(Unit::Group { table: table.clone(), group: this, first }));
        }
        *batches = Some(table.batches(this)?);
    }
}
