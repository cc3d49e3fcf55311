//! Writes the files of a run: answers and traces, then the report, and the results last.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use deepspec_core::atomic::{self, FileError};
use deepspec_cost::survival::sigmoid;
use deepspec_datasets::suites::TokenizedSuite;
use deepspec_engine::Finish;
use deepspec_text::ChatTokenizer;
use serde::Serialize;

use super::decode::{Answer, SuitePass};
use crate::report;
use crate::results::{self, Results};
use crate::traces::{self, Trace};

const OUTPUTS_FILE: &str = "outputs.jsonl";

/// Writes all files into `dir`. Old results are deleted first, so that they are never beside new
/// outputs.
pub fn write_run_files(
    dir: &Path,
    tokenizer: &ChatTokenizer,
    suites: &[TokenizedSuite],
    passes: &[SuitePass],
    results: &Results,
) -> anyhow::Result<()> {
    let old = dir.join(results::RESULTS_FILE);
    match fs::remove_file(&old) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(FileError::at("replacing", &old)(error).into());
        }
        _ => {}
    }
    let rows = output_rows(tokenizer, suites, passes)?;
    atomic::replace(&dir.join(OUTPUTS_FILE), |file| {
        rows.iter().try_for_each(|row| {
            serde_json::to_writer(&mut *file, row)?;
            file.write_all(b"\n")
        })
    })?;
    let temperatures = results.settings.calibration.as_deref().unwrap_or_default();
    let cycles = suites.iter().zip(passes).flat_map(|(suite, pass)| {
        pass.answers.iter().flat_map(|answer| trace_rows(suite, answer, temperatures))
    });
    traces::write(dir, cycles)?;
    report::write(dir, results)?;
    results.write(dir)
}

/// A row of `outputs.jsonl`.
#[derive(Serialize)]
struct Row<'a> {
    suite: &'a str,
    id: &'a str,
    seed: u64,
    turn: usize,
    text: String,
    tokens: usize,
    finish: Finish,
    token_ids: &'a [i64],
}

fn output_rows<'a>(
    tokenizer: &ChatTokenizer,
    suites: &'a [TokenizedSuite],
    passes: &'a [SuitePass],
) -> anyhow::Result<Vec<Row<'a>>> {
    let mut rows = vec![];
    for (suite, pass) in suites.iter().zip(passes) {
        for Answer { sample, seed, turn, completion, served, .. } in &pass.answers {
            let served_text = served.as_ref().and_then(|served| served.text.clone());
            rows.push(Row {
                suite: &suite.rows.suite.name,
                id: &suite.ids[*sample],
                seed: *seed,
                turn: *turn,
                text: served_text.map_or_else(|| tokenizer.decode_answer(&completion.tokens), Ok)?,
                tokens: served.as_ref().map_or(completion.tokens.len(), |served| served.tokens as usize),
                finish: completion.finish,
                token_ids: &completion.tokens,
            });
        }
    }
    Ok(rows)
}

fn trace_rows<'a>(
    suite: &'a TokenizedSuite,
    answer: &'a Answer,
    temperatures: &'a [f64],
) -> impl Iterator<Item = Trace<'a>> {
    let confidence = move |(k, &logit): (usize, &f32)| {
        sigmoid(f64::from(logit) / temperatures.get(k).copied().unwrap_or(1.0)) as f32
    };
    answer.completion.cycles.iter().enumerate().map(move |(index, cycle)| Trace {
        suite: &suite.rows.suite.name,
        sample: &suite.ids[answer.sample],
        seed: answer.seed,
        turn: answer.turn as u32,
        cycle: index as u32,
        proposed: cycle.proposed,
        usable: Some(cycle.until_stop),
        accepted: cycle.accepted,
        committed: cycle.committed,
        confidences: cycle.confidence.iter().enumerate().map(confidence).collect(),
        logits: &cycle.confidence,
    })
}
