//! Reads the samples' table into memory.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use arrow_array::{
    Array, Int32Array, Int64Array, ListArray, RecordBatch, StringArray, StructArray, UInt32Array,
};
use arrow_schema::{Field, Schema};
use deepspec_core::atomic::FileError;
use deepspec_core::digest;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::errors::ParquetError;

use super::validate::{RowValidator, SampleLocation, StatedRow};
use super::{MAX_BATCH_SAMPLES, SAMPLES_FILE, schema};
use crate::cache::error::CacheError;
use crate::cache::manifest::Manifest;

/// Location of a sample. Token ids and spans are ranges in the table's shared vectors.
#[derive(Debug)]
pub(crate) struct Row {
    pub id: String,
    pub place: SampleLocation,
    pub checksum: u32,
    ids: Range<usize>,
    spans: Range<usize>,
}

impl Row {
    /// The error for exponents that cannot be decompressed.
    pub fn decompress_error(&self) -> impl Fn(io::Error) -> CacheError {
        |source| CacheError::Exponents { sample: self.id.clone(), source }
    }
}

/// The whole table in memory.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Row>,
    input_ids: Vec<i32>,
    spans: Vec<(u32, u32)>,
}

impl Table {
    /// Reads the table named by `manifest` and rejects any contradiction to the manifest.
    pub fn read(dir: &Path, manifest: &Manifest) -> Result<Self, CacheError> {
        let path = dir.join(SAMPLES_FILE);
        let found = fs::metadata(&path).map_err(FileError::at("reading", &path))?.len();
        let expected = manifest.samples.bytes;
        if found != expected {
            return Err(CacheError::Size { path, found, expected });
        }
        // The digest is checked first, so only bytes that this program wrote reach the parquet
        // decoder.
        let found = digest::sha256_of_file(&path)?;
        if found != manifest.samples.sha256 {
            return Err(CacheError::Digest { path, found, expected: manifest.samples.sha256.clone() });
        }
        let mut table = Self::default();
        let mut validator = RowValidator::new(&path, manifest)?;
        let schema = schema(manifest.encoding);
        for_each_batch(&path, schema, |batch| table.add_batch(batch, &mut validator))?;
        validator.check_totals(table.rows.len())?;
        Ok(table)
    }

    /// The rows, in plan order.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Token ids of a row of this table.
    pub fn input_ids(&self, row: &Row) -> &[i32] {
        &self.input_ids[row.ids.clone()]
    }

    /// Supervised spans of a row of this table.
    pub fn spans(&self, row: &Row) -> &[(u32, u32)] {
        &self.spans[row.spans.clone()]
    }

    fn add_batch(&mut self, batch: &RecordBatch, validator: &mut RowValidator<'_>) -> Result<(), CacheError> {
        let path = validator.path;
        let ids: &StringArray = typed_column(path, batch, 0)?;
        let shards: &UInt32Array = typed_column(path, batch, 1)?;
        let first_rows: &Int64Array = typed_column(path, batch, 2)?;
        let first_last_rows: &Int64Array = typed_column(path, batch, 3)?;
        let lengths: &Int32Array = typed_column(path, batch, 4)?;
        let supervised: &Int32Array = typed_column(path, batch, 5)?;
        let input_ids: &ListArray = typed_column(path, batch, 6)?;
        let spans: &ListArray = typed_column(path, batch, 7)?;
        let checksums: &UInt32Array = typed_column(path, batch, 8)?;
        let exponents: Option<(&Int64Array, &Int64Array)> = match batch.num_columns() {
            11 => Some((typed_column(path, batch, 9)?, typed_column(path, batch, 10)?)),
            _ => None,
        };
        for index in 0..batch.num_rows() {
            let (ids_from, spans_from) = (self.input_ids.len(), self.spans.len());
            let tokens = input_ids.value(index);
            let tokens: &Int32Array = downcast_array(path, "input_ids", &*tokens)?;
            self.input_ids.extend_from_slice(tokens.values());
            let pairs = spans.value(index);
            let pairs: &StructArray = downcast_array(path, "loss_spans", &*pairs)?;
            let starts: &Int32Array = downcast_array(path, "loss_spans.start", &**pairs.column(0))?;
            let ends: &Int32Array = downcast_array(path, "loss_spans.end", &**pairs.column(1))?;
            // A negative bound becomes larger than every length, which the validator rejects.
            let bound = |value: i32| u32::try_from(value).unwrap_or(u32::MAX);
            let bounds = starts.values().iter().zip(ends.values());
            self.spans.extend(bounds.map(|(&start, &end)| (bound(start), bound(end))));
            let (first_exponent, exponent_bytes) =
                exponents.map_or((0, 0), |(first, bytes)| (first.value(index), bytes.value(index)));
            let claim = StatedRow {
                shard: shards.value(index).into(),
                first_row: first_rows.value(index),
                first_last_row: first_last_rows.value(index),
                length: lengths.value(index).into(),
                supervised: supervised.value(index).into(),
                first_exponent,
                exponent_bytes,
            };
            let (new_ids, new_spans) = (&self.input_ids[ids_from..], &self.spans[spans_from..]);
            let place = validator.check_row(self.rows.len(), &claim, new_ids, new_spans)?;
            let (id, checksum) = (ids.value(index).to_string(), checksums.value(index));
            let (ids, spans) = (ids_from..self.input_ids.len(), spans_from..self.spans.len());
            self.rows.push(Row { id, place, checksum, ids, spans });
        }
        Ok(())
    }
}

fn for_each_batch(
    path: &Path,
    expected: &Schema,
    mut each: impl FnMut(&RecordBatch) -> Result<(), CacheError>,
) -> Result<(), CacheError> {
    let parquet = |source| CacheError::Parquet { path: path.to_path_buf(), source };
    let file = File::open(path).map_err(FileError::at("reading", path))?;
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(parquet)?;
    check_columns(path, builder.schema(), expected)?;
    for batch in builder.with_batch_size(MAX_BATCH_SAMPLES).build().map_err(parquet)? {
        each(&batch.map_err(|error| parquet(ParquetError::from(error)))?)?;
    }
    Ok(())
}

fn check_columns(path: &Path, found: &Schema, expected: &Schema) -> Result<(), CacheError> {
    let named = |field: Option<&Arc<Field>>| match field {
        Some(field) if field.is_nullable() => format!("{} {} or null", field.name(), field.data_type()),
        Some(field) => format!("{} {}", field.name(), field.data_type()),
        None => "none".to_string(),
    };
    for index in 0..found.fields().len().max(expected.fields().len()) {
        let [found, expected] = [found, expected].map(|schema| named(schema.fields().get(index)));
        if found != expected {
            return Err(CacheError::Column { path: path.to_path_buf(), found, expected });
        }
    }
    Ok(())
}

fn typed_column<'b, A: Array + 'static>(
    path: &Path,
    batch: &'b RecordBatch,
    column: usize,
) -> Result<&'b A, CacheError> {
    downcast_array(path, batch.schema().field(column).name(), &**batch.column(column))
}

fn downcast_array<'b, A: Array + 'static>(
    path: &Path,
    name: &str,
    array: &'b dyn Array,
) -> Result<&'b A, CacheError> {
    array.as_any().downcast_ref().ok_or_else(|| CacheError::Column {
        path: path.to_path_buf(),
        found: format!("{name} {}", array.data_type()),
        expected: std::any::type_name::<A>().rsplit("::").next().unwrap_or_default().to_string(),
    })
}
