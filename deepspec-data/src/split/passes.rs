//! Reads the datasets once to check the rows, and a second time if some are unusable.
//!
//! Rows can be assigned to training or evaluation only when the number of usable rows is known. In
//! most datasets all rows are usable, so the first pass assumes this and writes while it reads. At
//! the first unusable row the pass stops writing but checks the remaining rows. A second pass then
//! writes. The outputs of one pass and of two passes are equal.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use deepspec_core::progress::Progress;

use super::assign::{Quota, Side, SplitAssigner};
use super::conversation::OutputId;
use super::filter::{IdRenamer, MatchedRow, RowFilter, RowMatcher, SourceFindings};
use super::input::Input;
use super::output::{Lines, Outputs, Writer};
use super::overlap::Overlap;
use super::pipeline;
use super::sampled::SampledSource;
use super::unit::each_row;
use deepspec_datasets::rows::Unit;

/// Consecutive rows, each assigned to training or evaluation.
struct Piece {
    unit: Unit,
    sides: Vec<Side>,
    /// Index of the first row in its source.
    first: usize,
}

/// Settings of the first pass, which writes its outputs if all rows are usable.
pub struct FirstPass<'a> {
    /// The output files.
    pub outputs: &'a Outputs<'a>,
    /// The seed of the sides.
    pub seed: u64,
    /// Number of rows and quota of each source.
    pub quotas: &'a [(usize, Quota)],
    /// Whether a prompt may occur on both sides.
    pub allows_overlap: bool,
}

/// The first pass. Returns its result for each source, and whether it wrote the outputs because all
/// rows were usable.
pub fn first_pass(
    inputs: &[Input],
    optimistic: &FirstPass<'_>,
    matcher: RowMatcher<'_>,
    row_filter: &mut RowFilter<'_>,
    progress: &mut Progress,
) -> anyhow::Result<(Vec<SourceFindings>, bool)> {
    let (mut all, lost) = (vec![], AtomicBool::new(false));
    let written = optimistic.outputs.write(|writer| {
        for (input, (rows, quota)) in inputs.iter().zip(optimistic.quotas) {
            let assigner = SplitAssigner::new(optimistic.seed, input.name.as_deref(), *rows, *quota);
            let mut found = SourceFindings::new(matcher.suites.suites().len());
            first_pass_of_input(input, assigner, matcher, &lost, |file, checked, lines, ids| {
                progress.add(checked.len() as u64, String::new);
                for row in checked {
                    if !row_filter.decide(&file, row, ids, &mut found)? {
                        lost.store(true, Ordering::Relaxed);
                    }
                }
                if !lost.load(Ordering::Relaxed) {
                    writer.write(&lines)?;
                }
                Ok(())
            })?;
            all.push(found);
        }
        let complete = all.iter().zip(optimistic.quotas).all(|(found, (rows, _))| found.rows() == *rows);
        if !complete || lost.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let quotas = optimistic.quotas.iter().map(|(_, quota)| *quota);
        let drawn = inputs.iter().zip(&all).zip(quotas).map(|((input, found), quota)| SampledSource {
            input,
            found,
            quota,
        });
        Ok(optimistic.allows_overlap || Overlap::of(&drawn.collect::<Vec<_>>(), optimistic.seed).total() == 0)
    })?;
    Ok((all, written))
}

fn first_pass_of_input(
    input: &Input,
    mut assigner: SplitAssigner,
    matcher: RowMatcher<'_>,
    lost: &AtomicBool,
    mut deliver: impl FnMut(Arc<Path>, Vec<MatchedRow>, Lines, &mut IdRenamer) -> anyhow::Result<()> + Send,
) -> anyhow::Result<()> {
    let (mut units, mut ids, mut next) = (input.source.units(), IdRenamer::default(), 0);
    let read = || {
        let Some(unit) = units.next().transpose()? else { return Ok(None) };
        let first = next;
        next += unit.rows();
        Ok(Some(Piece { sides: (0..unit.rows()).map(|_| assigner.next()).collect(), unit, first }))
    };
    let work = |piece: Piece| {
        let Piece { unit, sides, first } = piece;
        let (file, rows) = (Arc::clone(unit.file()), sides.len());
        let (mut checked, mut lines, mut scratch) = (Vec::with_capacity(rows), Lines::default(), vec![]);
        each_row(
            unit,
            &input.roles,
            |_| true,
            |place, mut row| {
                checked.push(matcher.hash_and_match(place.line, &mut row, &mut scratch));
                match row {
                    Ok(row) if !lost.load(Ordering::Relaxed) => {
                        let name = OutputId {
                            source: input.name.as_deref(),
                            index: first + place.index,
                            renamed: None,
                        };
                        lines.add(sides[place.index], &row, &name);
                    }
                    _ => {}
                }
            },
        )?;
        anyhow::ensure!(
            checked.len() == rows,
            "{}: {} rows where {rows} were read",
            file.display(),
            checked.len()
        );
        Ok((file, checked, lines))
    };
    pipeline::run(read, work, |(file, checked, lines)| deliver(file, checked, lines, &mut ids))
}

/// The second pass: writes the sampled rows in the order of the datasets. With `left_out`, training
/// rows with a held-out prompt are dropped.
///
/// # Errors
/// If a file cannot be read or written, or a dataset has changed since the first pass.
pub fn second_pass(
    sources: &[SampledSource<'_>],
    outputs: &Outputs<'_>,
    seed: u64,
    left_out: Option<&Overlap>,
    progress: &mut Progress,
) -> anyhow::Result<()> {
    outputs.write(|writer| {
        sources
            .iter()
            .try_for_each(|source| second_pass_of_source(source, seed, left_out, writer, progress))?;
        Ok(true)
    })?;
    Ok(())
}

fn second_pass_of_source(
    source: &SampledSource<'_>,
    seed: u64,
    left_out: Option<&Overlap>,
    writer: &mut Writer<'_>,
    progress: &mut Progress,
) -> anyhow::Result<()> {
    let SampledSource { input, found, quota } = source;
    let mut units = input.source.units();
    let mut assigner = SplitAssigner::new(seed, input.name.as_deref(), found.usable_rows, *quota);
    let mut next = 0;
    let changed = || anyhow::anyhow!("{}: the rows changed while they were read", input.origin.dataset);
    let read = || -> anyhow::Result<Option<Piece>> {
        let Some(unit) = units.next().transpose()? else {
            return if next == found.rows() { Ok(None) } else { Err(changed()) };
        };
        let first = next;
        next += unit.rows();
        let side = |row| {
            let side = if found.usable.get(row)? { assigner.next() } else { Side::Out };
            let overlaps =
                side == Side::Train && left_out.is_some_and(|held| held.holds_out(found.asked[row]));
            Some(if overlaps { Side::Out } else { side })
        };
        let sides: Option<Vec<Side>> = (first..next).map(side).collect();
        Ok(Some(Piece { unit, sides: sides.ok_or_else(changed)?, first }))
    };
    pipeline::run(
        read,
        |piece| {
            let rows = piece.sides.len();
            Ok((rows, format_lines(piece, input, found)?.ok_or_else(changed)?))
        },
        |(rows, lines)| {
            progress.add(rows as u64, String::new);
            Ok(writer.write(&lines)?)
        },
    )
}

/// The lines of a piece's rows; None if a usable row has become unusable.
fn format_lines(piece: Piece, input: &Input, found: &SourceFindings) -> anyhow::Result<Option<Lines>> {
    let Piece { unit, sides, first } = piece;
    let (mut lines, mut bad) = (Lines::default(), false);
    let wanted = |row: usize| sides[row] != Side::Out;
    each_row(unit, &input.roles, wanted, |place, row| match row {
        Ok(row) => {
            let index = first + place.index;
            let renamed = found.renamed.get(&index).map(String::as_str);
            let name = OutputId { source: input.name.as_deref(), index, renamed };
            lines.add(sides[place.index], &row, &name);
        }
        Err(_) => bad |= wanted(place.index),
    })?;
    Ok((!bad).then_some(lines))
}
