//! `traces.parquet`: one row per verification cycle of a run.
//!
//! Rows are in the order of `outputs.jsonl`. The columns `suite`, `sample`, `seed` and `turn`
//! identify the answer, and `cycle` counts from 0 within a turn. The counts `proposed`, `accepted`
//! and `committed` end at an accepted stop token; of a tree, `proposed` is the depth. `usable` counts
//! the proposed tokens up to the first drafted stop token, accepted or not; traces of earlier versions
//! lack it. `confidences`
//! holds the calibrated confidences of the proposed tokens, and `confidence_logits` the outputs of
//! the confidence head. Both lists are empty without a confidence head, and for trees.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Int32Type, UInt64Type};
use arrow_array::{
    Array, ArrayRef, Float32Array, Int32Array, ListArray, RecordBatch, StringArray, UInt64Array,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::ArrowError;
use arrow_schema::{DataType, Field, Schema};
use deepspec_core::cli::catch_panic;
use deepspec_core::{atomic, usage};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

/// Name of the trace file.
pub const TRACES_FILE: &str = "traces.parquet";
/// Number of rows written at once.
const ROWS_PER_BATCH: usize = 1 << 16;

/// One cycle.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace<'a> {
    /// Name of the suite.
    pub suite: &'a str,
    /// Id of the sample.
    pub sample: &'a str,
    /// Sampling seed.
    pub seed: u64,
    /// Turn of the conversation, from 0.
    pub turn: u32,
    /// Cycle of the turn, from 0.
    pub cycle: u32,
    /// Drafted tokens that were verified, up to an accepted stop token.
    pub proposed: u32,
    /// Verified tokens up to the first drafted stop token; None in traces of earlier versions.
    pub usable: Option<u32>,
    /// Drafted tokens that were accepted, up to a stop token.
    pub accepted: u32,
    /// Number of committed tokens.
    pub committed: u32,
    /// Confidences of the proposed tokens.
    pub confidences: Vec<f32>,
    /// Confidence logits of the proposed tokens.
    pub logits: &'a [f32],
}

fn schema() -> Arc<Schema> {
    let column = |name: &str, kind| Field::new(name, kind, false);
    let optional = |name: &str, kind| Field::new(name, kind, true);
    let list = || DataType::List(Arc::new(Field::new("element", DataType::Float32, false)));
    Arc::new(Schema::new(vec![
        column("suite", DataType::Utf8),
        column("sample", DataType::Utf8),
        column("seed", DataType::UInt64),
        column("turn", DataType::Int32),
        column("cycle", DataType::Int32),
        column("proposed", DataType::Int32),
        optional("usable", DataType::Int32),
        column("accepted", DataType::Int32),
        column("committed", DataType::Int32),
        column("confidences", list()),
        column("confidence_logits", list()),
    ]))
}

/// Writes the traces into `dir` atomically.
///
/// # Errors
/// Fails on I/O errors, with the path.
pub fn write<'a>(dir: &Path, mut traces: impl Iterator<Item = Trace<'a>>) -> anyhow::Result<()> {
    let compression = Compression::ZSTD(ZstdLevel::default());
    let properties = WriterProperties::builder().set_compression(compression).build();
    let schema = schema();
    atomic::replace(&dir.join(TRACES_FILE), |file| {
        let mut writer =
            ArrowWriter::try_new(file, schema.clone(), Some(properties)).map_err(io::Error::other)?;
        loop {
            let rows: Vec<Trace> = traces.by_ref().take(ROWS_PER_BATCH).collect();
            if rows.is_empty() {
                break;
            }
            writer.write(&record_batch(&schema, &rows).map_err(io::Error::other)?)?;
        }
        writer.close()?;
        Ok(())
    })?;
    Ok(())
}

fn record_batch(schema: &Arc<Schema>, rows: &[Trace]) -> Result<RecordBatch, ArrowError> {
    let texts = |text: fn(&Trace) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(rows.iter().map(text)))
    };
    let counts = |count: fn(&Trace) -> u32| -> ArrayRef {
        Arc::new(Int32Array::from_iter_values(rows.iter().map(|row| count(row) as i32)))
    };
    let lists = |name: &str, list: for<'r> fn(&'r Trace) -> &'r [f32]| -> Result<ArrayRef, ArrowError> {
        let DataType::List(element) = schema.field_with_name(name)?.data_type() else {
            return Err(ArrowError::SchemaError(format!("{name} is no list")));
        };
        let lengths = OffsetBuffer::from_lengths(rows.iter().map(|row| list(row).len()));
        let values = Float32Array::from_iter_values(rows.iter().flat_map(|row| list(row).iter().copied()));
        Ok(Arc::new(ListArray::try_new(element.clone(), lengths, Arc::new(values), None)?))
    };
    let columns = vec![
        texts(|row| row.suite.to_owned()),
        texts(|row| row.sample.to_owned()),
        Arc::new(UInt64Array::from_iter_values(rows.iter().map(|row| row.seed))),
        counts(|row| row.turn),
        counts(|row| row.cycle),
        counts(|row| row.proposed),
        Arc::new(Int32Array::from_iter(rows.iter().map(|row| row.usable.map(|count| count as i32)))),
        counts(|row| row.accepted),
        counts(|row| row.committed),
        lists("confidences", |row| &row.confidences)?,
        lists("confidence_logits", |row| row.logits)?,
    ];
    RecordBatch::try_new(schema.clone(), columns)
}

/// Calls `each` with every trace of a run, in order. `path` is the run's folder or a file in it.
///
/// # Errors
/// Usage errors that name the file: it is missing, is not Parquet, or lacks a column of this
/// version.
pub fn read(path: &Path, mut each: impl FnMut(&Trace)) -> anyhow::Result<()> {
    let file = traces_path(path);
    let handle = match File::open(&file) {
        Ok(handle) => handle,
        Err(error) => usage!("{}: {error}; it is written beside results.json", file.display()),
    };
    let reader = ParquetRecordBatchReaderBuilder::try_new(handle).and_then(|builder| builder.build());
    let reader = match reader {
        Ok(reader) => reader,
        Err(error) => usage!("{}: {error}", file.display()),
    };
    // The Parquet decoder may panic on a damaged file.
    let done = catch_panic(|| {
        reader.into_iter().try_for_each(|batch| {
            batch.map_err(|error| error.to_string()).and_then(|batch| read_batch(&batch, &mut each))
        })
    });
    if let Err(problem) = done.and_then(|read| read) {
        usage!("{}: {problem}", file.display());
    }
    Ok(())
}

/// Path of the traces for a run's folder or results file.
fn traces_path(path: &Path) -> PathBuf {
    let dir = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
    dir.join(TRACES_FILE)
}

fn read_batch(batch: &RecordBatch, each: &mut impl FnMut(&Trace)) -> Result<(), String> {
    let column = |name: &str| {
        let missing = || format!("has no column `{name}`; run the evaluation again with this version");
        batch.column_by_name(name).ok_or_else(missing)
    };
    let wrong = |name: &str| format!("`{name}` has another type than this version writes");
    let texts = |name: &str| column(name)?.as_string_opt::<i32>().ok_or_else(|| wrong(name));
    let counts = |name: &str| column(name)?.as_primitive_opt::<Int32Type>().ok_or_else(|| wrong(name));
    let lists = |name: &str| {
        let lists = column(name)?.as_list_opt::<i32>().ok_or_else(|| wrong(name))?;
        let values = lists.values().as_primitive_opt::<Float32Type>().ok_or_else(|| wrong(name))?;
        let values: &[f32] = values.values();
        Ok::<_, String>((lists.value_offsets(), values))
    };
    let (suite, sample) = (texts("suite")?, texts("sample")?);
    let seed = column("seed")?.as_primitive_opt::<UInt64Type>().ok_or_else(|| wrong("seed"))?;
    let numbers = ["turn", "cycle", "proposed", "accepted", "committed"];
    let numbers =
        numbers.into_iter().map(|name| Ok((name, counts(name)?))).collect::<Result<Vec<_>, String>>()?;
    let usable = match batch.column_by_name("usable") {
        Some(column) => Some(column.as_primitive_opt::<Int32Type>().ok_or_else(|| wrong("usable"))?),
        None => None,
    };
    let (confidences, logits) = (lists("confidences")?, lists("confidence_logits")?);
    for row in 0..batch.num_rows() {
        let number = |at: usize| {
            let (name, column) = numbers[at];
            u32::try_from(column.value(row))
                .map_err(|_| format!("`{name}` of a row is {}", column.value(row)))
        };
        let list = |(offsets, values): (&[i32], &'_ [f32])| {
            values[offsets[row] as usize..offsets[row + 1] as usize].to_vec()
        };
        let (proposed, logits) = (number(2)?, list(logits));
        if !logits.is_empty() && logits.len() != proposed as usize {
            let found = logits.len();
            return Err(format!(
                "a row has {found} `confidence_logits` for `proposed` {proposed}; run the evaluation again"
            ));
        }
        let usable = match usable.filter(|column| column.is_valid(row)).map(|column| column.value(row)) {
            Some(count) if !(0..=i64::from(proposed)).contains(&i64::from(count)) => {
                return Err(format!("`usable` of a row is {count} of `proposed` {proposed}"));
            }
            count => count.map(|count| count as u32),
        };
        each(&Trace {
            suite: suite.value(row),
            sample: sample.value(row),
            seed: seed.value(row),
            turn: number(0)?,
            cycle: number(1)?,
            proposed,
            usable,
            accepted: number(3)?,
            committed: number(4)?,
            confidences: list(confidences),
            logits: &logits,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn traces_come_back_as_they_were_written() {
        let dir = tempfile::tempdir().unwrap();
        let logits = [[0.5], [3.0]];
        let trace = |cycle: u32| Trace {
            suite: "s",
            sample: "a",
            seed: u64::MAX,
            turn: 1,
            cycle,
            proposed: 1,
            usable: (cycle > 0).then_some(1),
            accepted: 1,
            committed: 2,
            confidences: vec![0.25],
            logits: &logits[cycle as usize % 2],
        };
        write(dir.path(), (0..ROWS_PER_BATCH as u32 + 3).map(trace)).unwrap();
        let mut next = 0;
        read(dir.path(), |row| {
            assert_eq!(*row, trace(next));
            next += 1;
        })
        .unwrap();
        assert_eq!(next, ROWS_PER_BATCH as u32 + 3);
        assert!(read(&dir.path().join("results.json"), |_| {}).is_ok(), "found beside the results");
        write(dir.path(), [Trace { proposed: 2, ..trace(0) }].into_iter()).unwrap();
        let problem = read(dir.path(), |_| {}).unwrap_err().to_string();
        assert!(problem.contains("1 `confidence_logits` for `proposed` 2"), "{problem}");
        write(dir.path(), [Trace { usable: Some(2), ..trace(0) }].into_iter()).unwrap();
        let problem = read(dir.path(), |_| {}).unwrap_err().to_string();
        assert!(problem.contains("`usable` of a row is 2 of `proposed` 1"), "{problem}");
        fs::write(dir.path().join(TRACES_FILE), "no parquet").unwrap();
        let problem = read(dir.path(), |_| {}).unwrap_err().to_string();
        assert!(problem.contains(TRACES_FILE), "{problem}");
    }
}
