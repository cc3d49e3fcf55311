//! `samples.parquet`: one row per sample, in plan order.
//!
//! Columns: `id`; `shard`, the number of its shard; `first_row` and `first_last_row`, the offsets
//! of its rows in the shard's `taps` and `last`; `length`, its tokens; `supervised`, its supervised
//! tokens; `input_ids`, its token ids; `loss_spans`, its supervised half-open spans. `checksum` is
//! the CRC-32 of the sample's bytes in `taps`, `last`, `taps_scale`, `last_scale` and `exponents`,
//! in this order, without absent tensors. With compressed exponents, `first_exponent` and
//! `exponent_bytes` locate the sample's frames in the shard's `exponents`.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, LazyLock};

use arrow_array::{
    ArrayRef, Int32Array, Int64Array, ListArray, RecordBatch, StringArray, StructArray, UInt32Array,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::ArrowError;
use arrow_schema::{DataType, Field, Fields, Schema};
use deepspec_core::atomic::{self, FileError};
use deepspec_core::digest;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use crate::cache::error::CacheError;
use crate::cache::files::SamplesEntry;
use crate::cache::layout::Encoding;
use crate::cache::plan::Plan;
use crate::cache::sample::PlannedSample;

mod table;
mod validate;

pub(crate) use table::{Row, Table};

/// Name of the samples' table.
pub const SAMPLES_FILE: &str = "samples.parquet";

/// Most samples and tokens of a batch that is passed to parquet.
const MAX_BATCH_SAMPLES: usize = 1024;
const MAX_BATCH_TOKENS: u64 = 1 << 22;

/// Bytes of a row group, which parquet buffers in memory.
const ROW_GROUP_BYTES: usize = 64 << 20;

static SPAN_FIELDS: LazyLock<Fields> =
    LazyLock::new(|| [("start", DataType::Int32), ("end", DataType::Int32)].map(column).to_vec().into());

static PLAIN_SCHEMA: LazyLock<Arc<Schema>> = LazyLock::new(|| Arc::new(build_schema(false)));
static COMPRESSED_SCHEMA: LazyLock<Arc<Schema>> = LazyLock::new(|| Arc::new(build_schema(true)));

/// The columns of a table for this encoding.
fn schema(encoding: Encoding) -> &'static Arc<Schema> {
    if encoding.compresses() { &COMPRESSED_SCHEMA } else { &PLAIN_SCHEMA }
}

fn build_schema(compressed: bool) -> Schema {
    let list = |element: DataType| DataType::List(Arc::new(Field::new("element", element, false)));
    let mut columns = vec![
        ("id", DataType::Utf8),
        ("shard", DataType::UInt32),
        ("first_row", DataType::Int64),
        ("first_last_row", DataType::Int64),
        ("length", DataType::Int32),
        ("supervised", DataType::Int32),
        ("input_ids", list(DataType::Int32)),
        ("loss_spans", list(DataType::Struct(SPAN_FIELDS.clone()))),
        ("checksum", DataType::UInt32),
    ];
    if compressed {
        columns.extend([("first_exponent", DataType::Int64), ("exponent_bytes", DataType::Int64)]);
    }
    Schema::new(columns.into_iter().map(column).collect::<Vec<_>>())
}

fn column((name, kind): (&str, DataType)) -> Field {
    Field::new(name, kind, false)
}

/// Checksum and compressed size of a sample, known once it is written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WrittenSample {
    pub checksum: u32,
    /// Bytes of its compressed exponents; 0 without compression.
    pub exponent_bytes: u64,
}

/// Writes the table of a plan whose samples were written as `written` says. Returns the manifest
/// entry.
pub(crate) fn write_table(
    dir: &Path,
    plan: &Plan,
    written: &[WrittenSample],
) -> Result<SamplesEntry, CacheError> {
    let path = dir.join(SAMPLES_FILE);
    let rows = plan_rows(plan, |index| written[index]);
    atomic::replace(&path, |file| write_rows(file, plan.layout().encoding, &rows))?;
    let bytes = fs::metadata(&path).map_err(FileError::at("reading", &path))?.len();
    Ok(SamplesEntry { file: SAMPLES_FILE.to_string(), bytes, sha256: digest::sha256_of_file(&path)? })
}

/// Number of bytes that a plan's table will have. Checksums do not compress, so placeholders give
/// the right size.
pub(crate) fn table_bytes(plan: &Plan) -> Result<u64, CacheError> {
    let mut counter = ByteCounter(0);
    // Placeholder numbers that compress as badly as real ones.
    let written = |index: usize| {
        let checksum = crc_fast::crc32_iso_hdlc(&index.to_le_bytes());
        WrittenSample { checksum, exponent_bytes: u64::from(checksum >> 12) }
    };
    let rows = plan_rows(plan, written);
    write_rows(&mut counter, plan.layout().encoding, &rows)
        .map_err(FileError::at("planning", Path::new(SAMPLES_FILE)))?;
    Ok(counter.0)
}

/// Counts the bytes written to it.
struct ByteCounter(u64);

impl Write for ByteCounter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn plan_rows(plan: &Plan, written: impl Fn(usize) -> WrittenSample) -> Vec<NewRow<'_>> {
    let mut rows = Vec::with_capacity(plan.samples().len());
    for (shard, planned) in plan.shards().iter().enumerate() {
        let (mut first_row, mut first_last_row, mut first_exponent) = (0, 0, 0);
        for index in planned.samples.clone() {
            let (sample, written) = (&plan.samples()[index], written(index));
            let shard = shard as u32;
            rows.push(NewRow { sample, shard, first_row, first_last_row, first_exponent, written });
            first_exponent += written.exponent_bytes as i64;
            first_row += i64::from(sample.length());
            first_last_row += sample.last_positions(plan.layout().last).len() as i64;
        }
    }
    rows
}

/// A row to write.
struct NewRow<'p> {
    sample: &'p PlannedSample,
    shard: u32,
    first_row: i64,
    first_last_row: i64,
    first_exponent: i64,
    written: WrittenSample,
}

fn write_rows(file: impl Write + Send, encoding: Encoding, mut rows: &[NewRow<'_>]) -> io::Result<()> {
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_max_row_group_bytes(Some(ROW_GROUP_BYTES))
        .build();
    let schema = schema(encoding);
    let mut writer =
        ArrowWriter::try_new(file, schema.clone(), Some(properties)).map_err(io::Error::other)?;
    while !rows.is_empty() {
        let (mut taken, mut tokens) = (0, 0);
        while taken < rows.len().min(MAX_BATCH_SAMPLES) && tokens < MAX_BATCH_TOKENS {
            tokens += u64::from(rows[taken].sample.length());
            taken += 1;
        }
        let batch = record_batch(schema, &rows[..taken]).map_err(io::Error::other)?;
        writer.write(&batch).map_err(io::Error::other)?;
        rows = &rows[taken..];
    }
    writer.close().map_err(io::Error::other)?;
    Ok(())
}

fn record_batch(schema: &Arc<Schema>, rows: &[NewRow<'_>]) -> Result<RecordBatch, ArrowError> {
    let samples = || rows.iter().map(|row| row.sample);
    let spans = || samples().flat_map(|sample| sample.spans.iter());
    let list =
        |name: &str, lengths: Vec<usize>, values: ArrayRef| match schema.field_with_name(name)?.data_type() {
            DataType::List(element) => {
                ListArray::try_new(element.clone(), OffsetBuffer::from_lengths(lengths), values, None)
            }
            other => Err(ArrowError::SchemaError(format!("{name} is {other}, not a list"))),
        };
    let ids = Int32Array::from_iter_values(samples().flat_map(|sample| sample.input_ids.iter().copied()));
    let starts = Int32Array::from_iter_values(spans().map(|span| span.0 as i32));
    let ends = Int32Array::from_iter_values(spans().map(|span| span.1 as i32));
    let pairs = StructArray::try_new(SPAN_FIELDS.clone(), vec![Arc::new(starts), Arc::new(ends)], None)?;
    let mut columns: Vec<ArrayRef> = vec![
        Arc::new(StringArray::from_iter_values(samples().map(|sample| &sample.id))),
        Arc::new(UInt32Array::from_iter_values(rows.iter().map(|row| row.shard))),
        Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row.first_row))),
        Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row.first_last_row))),
        Arc::new(Int32Array::from_iter_values(samples().map(|sample| sample.length() as i32))),
        Arc::new(Int32Array::from_iter_values(samples().map(|sample| sample.supervised_count() as i32))),
        Arc::new(list("input_ids", samples().map(|sample| sample.input_ids.len()).collect(), Arc::new(ids))?),
        Arc::new(list("loss_spans", samples().map(|sample| sample.spans.len()).collect(), Arc::new(pairs))?),
        Arc::new(UInt32Array::from_iter_values(rows.iter().map(|row| row.written.checksum))),
    ];
    if columns.len() < schema.fields().len() {
        let bytes = rows.iter().map(|row| row.written.exponent_bytes as i64);
        columns.push(Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row.first_exponent))));
        columns.push(Arc::new(Int64Array::from_iter_values(bytes)));
    }
    RecordBatch::try_new(schema.clone(), columns)
}
