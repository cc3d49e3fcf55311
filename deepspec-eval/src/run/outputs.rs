//! The files of a run: answers, traces, and last the results.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int32Array, ListArray, RecordBatch, StringArray};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Schema};
use arrow::error::ArrowError;
use deepspec_core::atomic::{self, FileError};
use deepspec_decode::{Cycle, Finish};
use deepspec_suites::Prepared;
use deepspec_text::ChatTokenizer;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use serde::Serialize;

use super::decode::Pass;
use crate::results::{self, Results};

const OUTPUTS: &str = "outputs.jsonl";
const TRACES: &str = "traces.parquet";

/// Writes everything into `dir`; old results go first, so that they never stand beside new outputs.
pub fn write(
    dir: &Path,
    tokenizer: &ChatTokenizer,
    suites: &[Prepared],
    passes: &[Pass],
    results: &Results,
) -> anyhow::Result<()> {
    let old = dir.join(results::FILE);
    match fs::remove_file(&old) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(FileError::at("replacing", &old)(error).into());
        }
        _ => {}
    }
    let answers = answers(tokenizer, suites, passes)?;
    atomic::replace(&dir.join(OUTPUTS), |file| {
        answers.iter().try_for_each(|answer| {
            serde_json::to_writer(&mut *file, answer)?;
            file.write_all(b"\n")
        })
    })?;
    write_traces(&dir.join(TRACES), suites, passes)?;
    results.write(dir)
}

/// A row of `outputs.jsonl`.
#[derive(Serialize)]
struct Answer<'a> {
    suite: &'a str,
    id: &'a str,
    text: String,
    tokens: usize,
    finish: Finish,
    token_ids: &'a [i64],
}

fn answers<'a>(
    tokenizer: &ChatTokenizer,
    suites: &'a [Prepared],
    passes: &'a [Pass],
) -> anyhow::Result<Vec<Answer<'a>>> {
    let mut answers = vec![];
    for (suite, pass) in suites.iter().zip(passes) {
        for (id, completion) in suite.ids.iter().zip(&pass.completions) {
            answers.push(Answer {
                suite: &suite.rows.suite.name,
                id,
                text: tokenizer.decode(&completion.tokens, true)?,
                tokens: completion.tokens.len(),
                finish: completion.finish,
                token_ids: &completion.tokens,
            });
        }
    }
    Ok(answers)
}

/// `traces.parquet`, one row per cycle in the order of `outputs.jsonl`: `suite` and `sample` ids; `cycle` from 0 in each sample;
/// `proposed`, `accepted` and `committed` tokens; `confidences` of the proposed tokens, empty without a confidence head.
fn write_traces(path: &Path, suites: &[Prepared], passes: &[Pass]) -> anyhow::Result<()> {
    let column = |name: &str, kind| Field::new(name, kind, false);
    let element = Arc::new(Field::new("element", DataType::Float32, false));
    let schema = Arc::new(Schema::new(vec![
        column("suite", DataType::Utf8),
        column("sample", DataType::Utf8),
        column("cycle", DataType::Int32),
        column("proposed", DataType::Int32),
        column("accepted", DataType::Int32),
        column("committed", DataType::Int32),
        column("confidences", DataType::List(element)),
    ]));
    let compression = Compression::ZSTD(ZstdLevel::default());
    let properties = WriterProperties::builder().set_compression(compression).build();
    atomic::replace(path, |file| {
        let mut writer =
            ArrowWriter::try_new(file, schema.clone(), Some(properties)).map_err(io::Error::other)?;
        for (suite, pass) in suites.iter().zip(passes) {
            writer.write(&traces(&schema, suite, pass).map_err(io::Error::other)?)?;
        }
        writer.close()?;
        Ok(())
    })?;
    Ok(())
}

fn traces(schema: &Arc<Schema>, suite: &Prepared, pass: &Pass) -> Result<RecordBatch, ArrowError> {
    let samples = suite.ids.iter().zip(&pass.completions);
    let rows: Vec<(&str, usize, &Cycle)> = samples
        .flat_map(|(id, completion)| {
            completion.cycles.iter().enumerate().map(move |(index, cycle)| (id.as_str(), index, cycle))
        })
        .collect();
    let counts = |count: fn(&Cycle) -> u32| -> ArrayRef {
        Arc::new(Int32Array::from_iter_values(rows.iter().map(|(_, _, cycle)| count(cycle) as i32)))
    };
    let DataType::List(element) = schema.field_with_name("confidences")?.data_type() else {
        return Err(ArrowError::SchemaError("confidences is no list".into()));
    };
    let lengths = OffsetBuffer::from_lengths(rows.iter().map(|(_, _, cycle)| cycle.confidence.len()));
    let values = rows.iter().flat_map(|(_, _, cycle)| cycle.confidence.iter().copied());
    let confidences =
        ListArray::try_new(element.clone(), lengths, Arc::new(Float32Array::from_iter_values(values)), None)?;
    let columns: Vec<ArrayRef> = vec![
        Arc::new(StringArray::from_iter_values(rows.iter().map(|_| &suite.rows.suite.name))),
        Arc::new(StringArray::from_iter_values(rows.iter().map(|(id, _, _)| *id))),
        Arc::new(Int32Array::from_iter_values(rows.iter().map(|(_, index, _)| *index as i32))),
        counts(|cycle| cycle.proposed),
        counts(|cycle| cycle.accepted),
        counts(|cycle| cycle.committed),
        Arc::new(confidences),
    ];
    RecordBatch::try_new(schema.clone(), columns)
}
