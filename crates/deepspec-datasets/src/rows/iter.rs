//! Reads a dataset's rows as JSON objects, one by one.

use std::vec;

use anyhow::Context;
use arrow_array::RecordBatch;
use deepspec_core::jsonl::Line;
use serde_json::{Map, Value};

use crate::rows::table::json_lines;
use crate::rows::units::{Unit, Units, decode_row_group};

/// A row or its problem, at a 1-based line (JSON Lines) or row (parquet and JSON arrays).
pub struct RowItem {
    /// Line or row number.
    pub line: usize,
    /// The row, or a phrase that describes the problem.
    pub row: Result<Map<String, Value>, String>,
}

/// Iterates over parsed rows.
pub struct Rows {
    units: Units,
    ready: vec::IntoIter<RowItem>,
}

impl Rows {
    pub fn new(units: Units) -> Self {
        Self { units, ready: vec![].into_iter() }
    }
}

impl Iterator for Rows {
    type Item = anyhow::Result<RowItem>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(item) = self.ready.next() {
                return Some(Ok(item));
            }
            match self.units.next()?.and_then(parse_unit) {
                Ok(items) => self.ready = items.into_iter(),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

fn parse_unit(unit: Unit) -> anyhow::Result<Vec<RowItem>> {
    match unit {
        Unit::Lines { file, lines } => Ok(lines
            .iter()
            .map(|raw| match raw.parse(&file) {
                Line::Row(line, row) => RowItem { line, row: Ok(row) },
                Line::Bad(bad) => RowItem { line: bad.line, row: Err(bad.problem) },
            })
            .collect()),
        Unit::Batch { file, first, batch } => {
            parse_batch(first, &batch).with_context(|| format!("{}: from row {first}", file.display()))
        }
        Unit::Group { table, group, first } => {
            let batches = decode_row_group(&table, group, first)?;
            let items = batches.iter().map(|(first, batch)| parse_batch(*first, batch));
            let items: anyhow::Result<Vec<Vec<RowItem>>> = items.collect();
            let items = items.with_context(|| format!("{}: row group {group}", table.path().display()))?;
            Ok(items.into_iter().flatten().collect())
        }
    }
}

fn parse_batch(first: usize, batch: &RecordBatch) -> anyhow::Result<Vec<RowItem>> {
    let rows = rows_as_objects(batch)?.into_iter().enumerate();
    Ok(rows.map(|(index, row)| RowItem { line: first + index, row: Ok(row) }).collect())
}

/// The rows of a batch as JSON objects without nulls.
///
/// # Errors
/// Fails if a column's type cannot be written as JSON.
fn rows_as_objects(batch: &RecordBatch) -> anyhow::Result<Vec<Map<String, Value>>> {
    let text = json_lines(batch)?;
    let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    Ok(lines.map(serde_json::from_slice).collect::<Result<_, _>>()?)
}
