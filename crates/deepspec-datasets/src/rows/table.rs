//! Parquet files: their columns, and their rows in batches of limited size.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use arrow_array::RecordBatch;
use arrow_json::WriterBuilder;
use arrow_json::writer::LineDelimited;
use arrow_schema::{DataType, Schema};
use deepspec_core::atomic::FileError;
use deepspec_core::cli;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};

/// Intended maximum bytes of text in a batch, so that memory does not depend on row length.
pub const BATCH_BYTES: usize = 1 << 20;

/// Maximum number of rows in a batch.
const MAX_BATCH_ROWS: usize = 4096;

/// An open parquet file.
#[derive(Clone)]
pub struct Table {
    path: Arc<Path>,
    metadata: ArrowReaderMetadata,
}

impl Table {
    /// Reads the schema and the locations of the row groups.
    ///
    /// # Errors
    /// Fails if the file cannot be opened or is no parquet file.
    pub fn open(path: Arc<Path>) -> anyhow::Result<Self> {
        let file = File::open(&path).map_err(FileError::at("reading", &path))?;
        let metadata = catch_panics(|| ArrowReaderMetadata::load(&file, ArrowReaderOptions::new()))
            .with_context(|| format!("{}: not a readable parquet file", path.display()))?;
        Ok(Self { path, metadata })
    }

    /// Path of the file.
    pub fn path(&self) -> &Arc<Path> {
        &self.path
    }

    /// Arrow schema of the rows.
    pub fn schema(&self) -> &Schema {
        self.metadata.schema()
    }

    /// Number of rows in all groups.
    pub fn num_rows(&self) -> usize {
        (0..self.num_row_groups()).map(|group| self.group_rows(group)).sum()
    }

    /// Number of row groups.
    pub fn num_row_groups(&self) -> usize {
        self.metadata.metadata().num_row_groups()
    }

    /// Number of rows in a group.
    pub fn group_rows(&self, group: usize) -> usize {
        usize::try_from(self.metadata.metadata().row_group(group).num_rows()).unwrap_or(0)
    }

    /// Decompressed bytes of a group.
    pub fn group_bytes(&self, group: usize) -> usize {
        usize::try_from(self.metadata.metadata().row_group(group).total_byte_size()).unwrap_or(usize::MAX)
    }

    /// The rows of a group, in batches of about 1 MiB.
    ///
    /// # Errors
    /// Fails if the file cannot be opened or the group is malformed.
    pub fn batches(&self, group: usize) -> anyhow::Result<Batches> {
        let file = File::open(&self.path).map_err(FileError::at("reading", &self.path))?;
        let row_bytes = self.group_bytes(group) / self.group_rows(group).max(1);
        let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(file, self.metadata.clone())
            .with_row_groups(vec![group])
            .with_batch_size((BATCH_BYTES / row_bytes.max(1)).clamp(1, MAX_BATCH_ROWS));
        let reader = catch_panics(|| builder.build());
        let reader = reader.with_context(|| format!("{}: row group {group}", self.path.display()))?;
        Ok(Batches { path: Arc::clone(&self.path), reader })
    }

    /// The columns with their types, for messages.
    pub fn columns(&self) -> String {
        let columns = self
            .schema()
            .fields()
            .iter()
            .map(|field| format!("`{}` ({})", field.name(), type_name(field.data_type())));
        columns.collect::<Vec<_>>().join(", ")
    }
}

/// Batches of one row group.
pub struct Batches {
    path: Arc<Path>,
    reader: ParquetRecordBatchReader,
}

impl Batches {
    /// The next batch, whose first row is number `row`; None after the last batch.
    ///
    /// # Errors
    /// Fails if the data are malformed, with the file and the row. No batches follow an error.
    pub fn next(&mut self, row: usize) -> anyhow::Result<Option<RecordBatch>> {
        let batch = catch_panics(|| self.reader.next().transpose());
        batch.with_context(|| format!("{}: at row {row}", self.path.display()))
    }
}

/// Converts the decoder's panics on damaged files to errors.
fn catch_panics<T, E: Into<anyhow::Error>>(work: impl FnOnce() -> Result<T, E>) -> anyhow::Result<T> {
    match cli::catch_panic(work) {
        Ok(done) => done.map_err(Into::into),
        Err(panic) => anyhow::bail!("the file is damaged ({panic})"),
    }
}

/// Human-readable name of a column's type.
pub fn type_name(data_type: &DataType) -> String {
    match data_type {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => "string".into(),
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            format!("list<{}>", type_name(item.data_type()))
        }
        DataType::Struct(fields) => {
            let fields =
                fields.iter().map(|field| format!("{}: {}", field.name(), type_name(field.data_type())));
            format!("struct<{}>", fields.collect::<Vec<_>>().join(", "))
        }
        other => format!("{other:?}").to_lowercase(),
    }
}

/// The rows of a batch as one JSON line per row without nulls; `{}` if all values are null.
///
/// # Errors
/// Fails if a column's type cannot be written as JSON.
pub fn json_lines(batch: &RecordBatch) -> anyhow::Result<Vec<u8>> {
    let mut writer = WriterBuilder::new().with_explicit_nulls(false).build::<_, LineDelimited>(Vec::new());
    writer.write(batch)?;
    writer.finish()?;
    Ok(writer.into_inner())
}
