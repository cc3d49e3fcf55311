//! Rows of a local dataset file, parquet or JSONL, one at a time.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::vec;

use anyhow::Context;
use arrow::array::RecordBatch;
use arrow::json::WriterBuilder;
use arrow::json::writer::LineDelimited;
use deepspec_core::atomic::FileError;
use deepspec_core::{jsonl, usage};
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use serde_json::{Map, Value};

/// A row, or why there is none, at a 1-based line (JSONL) or row (parquet).
pub struct Item {
    /// Where it stands.
    pub line: usize,
    /// The row, or a phrase that says what is wrong with it.
    pub row: Result<Map<String, Value>, String>,
}

/// A dataset that can be read from its start any number of times.
pub enum Source {
    /// One JSON object per line.
    Jsonl(PathBuf),
    /// Columns.
    Parquet(PathBuf),
}

impl Source {
    /// Finds out what `dataset` names.
    ///
    /// # Errors
    /// A usage error unless it is an existing `.parquet` or `.jsonl` file.
    pub fn find(dataset: &str) -> anyhow::Result<Self> {
        let path = deepspec_core::env::expand_home(dataset);
        let extension =
            path.extension().and_then(|extension| extension.to_str()).unwrap_or_default().to_lowercase();
        if !path.exists() {
            let known = matches!(extension.as_str(), "parquet" | "jsonl" | "ndjson" | "json");
            if !known && dataset.split('/').count() == 2 && !dataset.starts_with(['.', '/', '~']) {
                usage!(
                    "--dataset {dataset}: downloading from the hub is not there yet; fetch its parquet files and give one as --dataset FILE.parquet"
                );
            }
            usage!("--dataset {dataset}: no such file");
        }
        match extension.as_str() {
            "parquet" => Ok(Self::Parquet(path)),
            "jsonl" | "ndjson" => Ok(Self::Jsonl(path)),
            _ => usage!("--dataset {dataset}: expected a .parquet or .jsonl file"),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        match self {
            Self::Jsonl(path) | Self::Parquet(path) => path,
        }
    }

    /// All rows from the first on.
    ///
    /// # Errors
    /// If the file cannot be opened, or is no parquet file although it says so.
    pub fn rows(&self) -> anyhow::Result<Box<dyn Iterator<Item = anyhow::Result<Item>>>> {
        match self {
            Self::Jsonl(path) => Ok(Box::new(jsonl::Reader::open(path)?.map(|line| {
                Ok(match line? {
                    jsonl::Line::Row(line, row) => Item { line, row: Ok(row) },
                    jsonl::Line::Bad(bad) => Item { line: bad.line, row: Err(bad.problem) },
                })
            }))),
            Self::Parquet(path) => {
                let file = File::open(path).map_err(FileError::at("reading", path))?;
                let batches = ParquetRecordBatchReaderBuilder::try_new(file)
                    .and_then(ParquetRecordBatchReaderBuilder::build)
                    .with_context(|| format!("{}: not a readable parquet file", path.display()))?;
                Ok(Box::new(ParquetRows { path: path.clone(), batches, rows: vec![].into_iter(), line: 0 }))
            }
        }
    }
}

struct ParquetRows {
    path: PathBuf,
    batches: ParquetRecordBatchReader,
    rows: vec::IntoIter<Map<String, Value>>,
    line: usize,
}

impl Iterator for ParquetRows {
    type Item = anyhow::Result<Item>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(row) = self.rows.next() {
                self.line += 1;
                return Some(Ok(Item { line: self.line, row: Ok(row) }));
            }
            let rows = self.batches.next()?.map_err(anyhow::Error::from).and_then(|batch| objects(&batch));
            match rows.with_context(|| format!("{}: behind row {}", self.path.display(), self.line)) {
                Ok(rows) => self.rows = rows.into_iter(),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

/// The rows of a batch as JSON objects, nulls left out.
fn objects(batch: &RecordBatch) -> anyhow::Result<Vec<Map<String, Value>>> {
    let mut writer = WriterBuilder::new().with_explicit_nulls(false).build::<_, LineDelimited>(Vec::new());
    writer.write(batch)?;
    writer.finish()?;
    let text = writer.into_inner();
    let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    Ok(lines.map(serde_json::from_slice).collect::<Result<_, _>>()?)
}
