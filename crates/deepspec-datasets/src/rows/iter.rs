//! Reads a dataset's rows as JSON objects, one by one.

use std::vec;

use anyhow::Context;
use arrow_array::RecordBatch;
use deepspec_core::jsonl::Line;
use serde_json::{Map, Value};

use crate::rows::table::json_lines;
use crate::rows::units::{Unit, Units, decode};

/// A row or its problem, at a 1-based line (JSON Lines) or row (parquet and JSON arrays).
pub struct Item {
    /// Line or row number.
    pub line: usize,
    /// The row, or a phrase that describes the problem.
    pub row: Result<Map<String, Value>, String>,
}

/// Iterates over parsed rows.
pub struct Rows {
    units: Units,
    ready: vec::IntoIter<Item>,
}

impl Rows {
    pub fn new(units: Units) -> Self {
        Self { units, ready: vec![].into_iter() }
    }
}

impl Iterator for Rows {
    type Item = anyhow::Result<Item>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(item) = self.ready.next() {
                return Some(Ok(item));
            }
            match self.units.next()?.and_then(items) {
                Ok(items) => self.ready = items.into_iter(),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

fn items(unit: Unit) -> anyhow::Result<Vec<Item>> {
    match unit {
        Unit::Lines { file, lines } => Ok(lines
            .iter()
            .map(|raw| match raw.parse(&file) {
                Line::Row(line, row) => Item { line, row: Ok(row) },
                Line::Bad(bad) => Item { line: bad.line, row: Err(bad.problem) },
            })
            .collect()),
        Unit::Batch { file, first, batch } => {
            of_batch(first, &batch).with_context(|| format!("{}: from row {first}", file.display()))
        }
        Unit::Group { table, group, first } => {
            let batches = decode(&table, group, first)?;
            let items = batches.iter().map(|(first, batch)| of_batch(*first, batch));
            let items: anyhow::Result<Vec<Vec<Item>>> = items.collect();
            let items = items.with_context(|| format!("{}: row group {group}", table.path().display()))?;
            Ok(items.into_iter().flatten().collect())
        }
    }
}

fn of_batch(first: usize, batch: &RecordBatch) -> anyhow::Result<Vec<Item>> {
    let rows = objects(batch)?.into_iter().enumerate();
    Ok(rows.map(|(index, row)| Item { line: first + index, row: Ok(row) }).collect())
}

/// The rows of a batch as JSON objects without nulls.
///
/// # Errors
/// Fails if a column's type cannot be written as JSON.
fn objects(batch: &RecordBatch) -> anyhow::Result<Vec<Map<String, Value>>> {
    let text = json_lines(batch)?;
    let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    Ok(lines.map(serde_json::from_slice).collect::<Result<_, _>>()?)
}
