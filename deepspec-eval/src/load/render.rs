//! Writes load measurements as a table, a report with plots, and one Parquet row per request.

use std::io;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use arrow_array::{ArrayRef, Float64Array, RecordBatch, StringArray, UInt64Array};
use deepspec_core::atomic;
use parquet::arrow::ArrowWriter;

use super::client::RequestRecord;
use super::summary::LoadSummary;
use super::{Level, LoadReport};
use crate::plot::{
    Axis, Plot, SeriesStyle, draw_axes, draw_point_labels, draw_series, draw_title_and_legend,
};
use crate::report::{Block, Document, write_document};
use crate::statistics::Percentiles;
use crate::table::Table;

const COLUMNS: [&str; 11] = [
    "server",
    "load",
    "requests",
    "failed",
    "tokens/s",
    "decoding alone",
    "tokens/s a user",
    "first token p50/p95/p99, s",
    "per token p50/p95/p99, ms",
    "between pieces p50/p95/p99, ms",
    "under way",
];

fn table_rows(report: &LoadReport) -> Vec<Vec<String>> {
    let times = |times: Option<Percentiles>, unit: f64, digits: usize| {
        times.map_or("–".into(), |t| {
            [t.p50, t.p95, t.p99].map(|t| format!("{:.digits$}", t * unit)).join(" / ")
        })
    };
    let row = |run: &LoadSummary| {
        vec![
            run.server.clone(),
            run.level.to_string(),
            run.requests.to_string(),
            run.failed.to_string(),
            format!("{:.1}", run.tokens_per_second),
            run.decoding.map_or("–".into(), |alone| format!("{:.1}", alone.tokens_per_second)),
            run.user_tokens_per_second.map_or("–".into(), |speed| format!("{speed:.1}")),
            times(run.time_to_first_token, 1.0, 3),
            times(run.time_per_token, 1e3, 1),
            times(run.between_chunks, 1e3, 1),
            format!("{:.1}", run.in_flight),
        ]
    };
    report.runs.iter().map(row).collect()
}

/// The table with one line per run.
pub fn table(report: &LoadReport) -> Table {
    let mut table = Table::new(COLUMNS.map(String::from).to_vec());
    table_rows(report).into_iter().for_each(|row| table.row(row));
    table
}

/// Writes report.md, report.html and the plots.
pub fn write_report(dir: &Path, report: &LoadReport) -> Result<()> {
    let words = format!(
        "Prompts of {}; answers of at most {} tokens at temperature {}; {} seconds each after {} that do not count. Tokens of an answer that \
         reaches beyond the time count in proportion. Decoding alone: tokens behind the first in the time in which nobody waited for a first \
         token, over that time.",
        report.suites.join(", "),
        report.max_new_tokens,
        report.temperature,
        report.seconds,
        report.warm_up
    );
    let header = COLUMNS.map(String::from).to_vec();
    let blocks = vec![
        Block::Paragraph(words),
        Block::Table(header, table_rows(report)),
        Block::Heading("Speed of all against speed of each"),
        Block::Plot("frontier", plot_frontier(report)?),
    ];
    write_document(dir, &Document { title: "Load".into(), blocks })
}

fn plot_frontier(report: &LoadReport) -> Result<Plot> {
    let mut servers: Vec<&str> = report.runs.iter().map(|run| run.server.as_str()).collect();
    servers.dedup();
    let keys: Vec<(&str, SeriesStyle)> =
        servers.iter().enumerate().map(|(index, name)| (*name, SeriesStyle::nth(index))).collect();
    let points = |server: &str| -> Vec<(f64, f64)> {
        let runs = report.runs.iter().filter(|run| run.server == server);
        runs.filter_map(|run| Some((run.user_tokens_per_second?, run.tokens_per_second))).collect()
    };
    let highest = |of: fn(&(f64, f64)) -> f64| {
        servers.iter().flat_map(|server| points(server)).map(|point| of(&point)).fold(1.0, f64::max) * 1.05
    };
    Plot::draw("Frontier", (720.max(200 + 110 * keys.len() as u32), 380), |canvas| {
        let area =
            draw_title_and_legend(canvas, "Tokens/s of all against tokens/s of each user, by load", &keys)?;
        let x = Axis::linear("tokens/s of each user", 0.0..highest(|point| point.0), 7);
        let mut chart =
            draw_axes(&area, x, Axis::linear("tokens/s of all", 0.0..highest(|point| point.1), 7))?;
        for (index, server) in servers.iter().enumerate() {
            draw_series(&mut chart, points(server), SeriesStyle::nth(index))?;
            let runs = report.runs.iter().filter(|run| run.server == *server);
            let named = runs.filter_map(|run| {
                Some((run.user_tokens_per_second?, run.tokens_per_second, run.level.to_string()))
            });
            draw_point_labels(&mut chart, named)?;
        }
        Ok(())
    })
}

/// Writes `requests.parquet`: one row per request, with times in seconds since the run began.
pub fn write_requests(dir: &Path, requests: &[(String, Level, RequestRecord)]) -> Result<()> {
    let texts = |of: fn(&(String, Level, RequestRecord)) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(requests.iter().map(of)))
    };
    let times = |of: fn(&RequestRecord) -> Option<f64>| -> ArrayRef {
        Arc::new(Float64Array::from_iter(requests.iter().map(|(_, _, asked)| of(asked))))
    };
    let counts = |at: usize| -> ArrayRef {
        Arc::new(UInt64Array::from_iter_values(requests.iter().map(|(_, _, asked)| asked.tokens[at])))
    };
    let problems = requests.iter().map(|(_, _, asked)| asked.problem.as_deref());
    let batch = RecordBatch::try_from_iter_with_nullable([
        ("server", texts(|(server, ..)| server.clone()), false),
        ("load", texts(|(_, level, _)| level.to_string()), false),
        ("suite", texts(|(_, _, asked)| asked.suite.clone()), false),
        ("sample", texts(|(_, _, asked)| asked.sample.clone()), false),
        ("begun", times(|asked| Some(asked.begun.as_secs_f64())), false),
        ("first_text", times(|asked| asked.chunks.first().map(std::time::Duration::as_secs_f64)), true),
        ("last_text", times(|asked| asked.chunks.last().map(std::time::Duration::as_secs_f64)), true),
        ("prompt_tokens", counts(0), false),
        ("completion_tokens", counts(1), false),
        ("problem", Arc::new(StringArray::from_iter(problems)), true),
    ])?;
    atomic::replace(&dir.join("requests.parquet"), |file| {
        let mut writer = ArrowWriter::try_new(file, batch.schema(), None).map_err(io::Error::other)?;
        writer.write(&batch).map_err(io::Error::other)?;
        writer.close().map_err(io::Error::other)?;
        Ok(())
    })?;
    Ok(())
}
