//! Parses the rows of a unit as conversations, for all file formats.

use anyhow::Context;
use deepspec_core::jsonl::Line;

use super::conversation::{Conversation, Problem, ProblemKind};
use super::fields::Fields;
use super::json_rows;
use super::roles::Roles;
use deepspec_datasets::rows::{Cell, Unit, decode_row_group};

/// The position of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowPosition {
    /// 0-based index in the unit.
    pub index: usize,
    /// 1-based line or row in the file.
    pub line: usize,
}

/// Calls `each` with every wanted row of a unit, in order: a conversation, or the reason why it is
/// unusable.
///
/// # Errors
/// If the file is malformed, or a column has a type without a JSON form. The error names the file
/// and the row.
pub fn each_row(
    unit: Unit,
    roles: &Roles,
    wanted: impl Fn(usize) -> bool,
    mut each: impl FnMut(RowPosition, Result<Conversation, Problem>),
) -> anyhow::Result<()> {
    let (file, first, batches) = match unit {
        Unit::Lines { file, lines } => {
            for (index, raw) in lines.iter().enumerate().filter(|&(index, _)| wanted(index)) {
                let row = match raw.parse(&file) {
                    Line::Row(_, row) => json_rows::conversation(row.into(), roles),
                    Line::Bad(bad) => Err(ProblemKind::NotAnObject.with_text(bad.problem)),
                };
                each(RowPosition { index, line: raw.number }, row);
            }
            return Ok(());
        }
        Unit::Batch { file, first, batch } => (file, first, vec![(first, batch)]),
        Unit::Group { table, group, first } => {
            if !(0..table.group_rows(group)).any(&wanted) {
                return Ok(());
            }
            (table.path().clone(), first, decode_row_group(&table, group, first)?)
        }
    };
    for (at, batch) in batches {
        Cell::check_writable(&batch).with_context(|| format!("{}: from row {at}", file.display()))?;
        for index in 0..batch.num_rows() {
            let place = RowPosition { index: at - first + index, line: at + index };
            if wanted(place.index) {
                let row = Fields::of_cells(Cell::row_cells(&batch, index));
                each(place, json_rows::conversation(row, roles));
            }
        }
    }
    Ok(())
}
