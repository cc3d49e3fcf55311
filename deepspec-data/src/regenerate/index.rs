//! Indexes the inputs: a first pass collects ids and malformed lines, a second one reads the rows
//! to answer.

use std::path::{Path, PathBuf};
use std::vec;

use deepspec_core::atomic::FileError;
use deepspec_core::digest;
use deepspec_core::jsonl::{self, BadLine, Line, RawLine};
use deepspec_core::row::UniqueIds;
use rayon::prelude::*;

use super::ids::IdSet;
use super::rows::Row;
use super::settings::RequestSettings;
use deepspec_capture::Rejected;

/// Number of lines per parallel batch. It limits memory, together with the longest line.
const LINES_PER_BATCH: usize = 1024;

/// Ids and malformed lines of the inputs.
#[derive(Default)]
pub struct InputIndex {
    /// Ids of the output rows: one per usable input row and sample.
    pub ids: IdSet,
    /// Lines that are not usable rows.
    pub rejected: Vec<Rejected>,
}

/// A line's number, and its row or the reason why it is malformed.
type Parsed = (usize, Result<Row, String>);

/// Reads all inputs once.
pub fn index_inputs(inputs: &[PathBuf], settings: &RequestSettings) -> Result<InputIndex, FileError> {
    let mut index = InputIndex::default();
    // Rows are assigned to workers by id, equally in all workers. Worker 0 reports malformed lines.
    let falls_here = |id: &str| settings.worker.builds(digest::fingerprint(id.as_bytes()) as usize);
    let mut names = IdAssigner::default();
    for batch in jsonl::line_batches_of_files(inputs, LINES_PER_BATCH) {
        let (file, batch) = batch?;
        for (line, row) in names.assign_ids(parse_batch(file, batch, settings)) {
            let here = row.as_ref().map_or(settings.worker.builds(0), |row| falls_here(&row.id));
            if let Some(Err(reason)) = here.then(|| row.and_then(|row| index.add(&row, settings))) {
                index.rejected.push(Rejected { file: file.to_path_buf(), line, reason });
            }
        }
    }
    names.ids.report();
    Ok(index)
}

impl InputIndex {
    fn add(&mut self, row: &Row, settings: &RequestSettings) -> Result<(), String> {
        let ids = Row::sample_ids(&row.id, settings.samples);
        if let Some(known) = ids.iter().find(|id| self.ids.contains(id)) {
            return Err(format!("id `{known}` was used by an earlier row"));
        }
        for id in &ids {
            self.ids.insert(id);
        }
        Ok(())
    }
}

/// The wanted rows of all inputs, with one row per sample.
pub fn select_rows<'a>(
    inputs: &'a [PathBuf],
    settings: &'a RequestSettings,
    wanted: impl Fn(&str) -> bool + 'a,
) -> impl Iterator<Item = Result<Row, FileError>> + 'a {
    usable_rows(inputs, settings).flat_map(move |row| match row {
        Err(error) => vec![Err(error)],
        Ok(row) => {
            row.into_samples(settings.samples).into_iter().filter(|row| wanted(&row.id)).map(Ok).collect()
        }
    })
}

/// All usable rows, in the order of the inputs.
pub fn usable_rows<'a>(
    inputs: &'a [PathBuf],
    settings: &'a RequestSettings,
) -> impl Iterator<Item = Result<Row, FileError>> + 'a {
    let mut names = IdAssigner::default();
    jsonl::line_batches_of_files(inputs, LINES_PER_BATCH).flat_map(move |batch| match batch {
        Err(error) => vec![Err(error)],
        Ok((file, batch)) => {
            let rows = names.assign_ids(parse_batch(file, batch, settings));
            rows.into_iter().filter_map(|(_, row)| row.ok().map(Ok)).collect()
        }
    })
}

/// Makes the ids of usable rows unique, in the order of the inputs.
#[derive(Default)]
struct IdAssigner {
    ids: UniqueIds,
    /// Number of lines so far.
    lines: usize,
}

impl IdAssigner {
    fn assign_ids(&mut self, parsed: Vec<Parsed>) -> Vec<Parsed> {
        let name = |(line, row): Parsed| {
            let place = self.lines;
            self.lines += 1;
            (line, row.map(|row| row.with_unique_id(&mut self.ids, place)))
        };
        parsed.into_iter().map(name).collect()
    }
}

fn parse_batch(file: &Path, batch: Vec<RawLine>, settings: &RequestSettings) -> Vec<Parsed> {
    let parse = |line: RawLine| match line.parse(file) {
        Line::Row(line, fields) => (line, Row::parse(fields, settings)),
        Line::Bad(BadLine { line, problem, .. }) => (line, Err(problem)),
    };
    batch.into_par_iter().map(parse).collect()
}
