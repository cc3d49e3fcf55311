//! Checks all rows in parallel.

use std::fmt;
use std::path::{Path, PathBuf};

use deepspec_core::cli::Verbosity;
use deepspec_core::jsonl;
use deepspec_core::progress::Progress;
use deepspec_core::row::UniqueIds;
use deepspec_text::Problem;
use rayon::prelude::*;
use serde::Serialize;

use super::row::{MaskedRow, RowOutcome, inspect_line};
use super::settings::MaskSettings;
use super::summary::{Lengths, MaskCandidate, Summary};

/// Rows per batch. It limits the text in memory and the frequency of progress updates.
const LINES_PER_BATCH: usize = 128;

/// A problem of a row.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// The file.
    pub file: PathBuf,
    /// 1-based line number.
    pub line: usize,
    /// The row's id, if it has one.
    pub id: Option<String>,
    /// The problem.
    pub reason: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: ", self.file.display(), self.line)?;
        if let Some(id) = &self.id {
            write!(f, "id {id:?}: ")?;
        }
        f.write_str(&self.reason)
    }
}

/// Counts and problems of all rows.
#[derive(Debug, Default)]
pub struct Inspection {
    /// Counts.
    pub summary: Summary,
    /// Every problem, in input order.
    pub findings: Vec<Finding>,
}

impl Inspection {
    /// Checks every row of `files`.
    pub fn check_files(
        files: &[PathBuf],
        settings: &MaskSettings,
        verbosity: Verbosity,
    ) -> anyhow::Result<Self> {
        let mut progress = Progress::new(verbosity, "rows", jsonl::count_lines(files)?, 0);
        let mut inspection = Self::default();
        inspection.summary.chat_template = settings.template.name.clone();
        inspection.summary.max_length = settings.max_length;
        inspection.summary.tags_agree = settings.other.as_ref().map(|_| 0);
        let (mut ids, mut lengths) = (UniqueIds::default(), Vec::new());
        let mut unused = settings.mask_candidates.clone();
        for batch in jsonl::line_batches_of_files(files, LINES_PER_BATCH) {
            let (file, batch) = batch?;
            let outcomes: Vec<(usize, RowOutcome)> = batch
                .into_par_iter()
                .map(|line| (line.number, inspect_line(settings, line.parse(file))))
                .collect();
            progress.add(outcomes.len() as u64, String::new);
            for (line, outcome) in outcomes {
                if let RowOutcome::Row(row) = &outcome {
                    for id in &row.supervised.input_ids {
                        unused.remove(id);
                    }
                }
                inspection.add(file, line, outcome, settings, &mut ids, &mut lengths);
            }
        }
        progress.finish();
        ids.report();
        inspection.summary.lengths = Lengths::of(lengths);
        if !settings.has_recipe || inspection.summary.with_mask_token > 0 {
            inspection.summary.mask_candidates = MaskCandidate::likeliest(unused, &settings.tokenizer);
        }
        Ok(inspection)
    }

    /// Adds a problem.
    pub fn add_finding(&mut self, file: &Path, line: usize, id: Option<String>, reason: String) {
        self.findings.push(Finding { file: file.to_path_buf(), line, id, reason });
    }

    /// Adds a row's counts and problems.
    fn add(
        &mut self,
        file: &Path,
        line: usize,
        outcome: RowOutcome,
        settings: &MaskSettings,
        ids: &mut UniqueIds,
        lengths: &mut Vec<u32>,
    ) {
        let place = self.summary.rows;
        self.summary.rows += 1;
        let mut row = match outcome {
            RowOutcome::Failed => {
                self.summary.status_error += 1;
                return;
            }
            RowOutcome::Unusable(id, reason) => {
                self.summary.unusable += 1;
                return self.add_finding(file, line, id, reason);
            }
            RowOutcome::Row(row) => row,
        };
        let id = row.assign_unique_id(ids, place);
        lengths.push(u32::try_from(row.supervised.untruncated_len).unwrap_or(u32::MAX));
        self.count_row(file, line, &row, settings);
        for problem in &row.checked.problems {
            self.add_finding(file, line, Some(id.clone()), problem.to_string());
        }
    }

    fn count_row(&mut self, file: &Path, line: usize, row: &MaskedRow, settings: &MaskSettings) {
        let (summary, problems) = (&mut self.summary, &row.checked.problems);
        let any = |kind: fn(&Problem) -> bool| usize::from(problems.iter().any(kind));
        summary.empty_masks += any(|problem| matches!(problem, Problem::Empty { .. }));
        summary.other_words += any(|problem| {
            use Problem::{Calls, Missing, Rewritten, Stray};
            matches!(problem, Stray { .. } | Missing { .. } | Rewritten { .. } | Calls { .. })
        });
        summary.other_prompts +=
            any(|problem| matches!(problem, Problem::Served { .. } | Problem::Unservable { .. }));
        match (problems.is_empty(), row.is_too_short()) {
            (false, _) => summary.with_problems += 1,
            (true, true) => summary.too_short += 1,
            (true, false) => summary.good += 1,
        }
        summary.cut += usize::from(row.is_truncated());
        summary.tokens += row.supervised.input_ids.len() as u64;
        summary.supervised_tokens += row.supervised.supervised_count() as u64;
        let given = row.lacks_system() && settings.template.default_system.is_some();
        summary.default_system += usize::from(given);
        let masked = settings.mask_token.is_some_and(|mask| row.supervised.input_ids.contains(&mask));
        summary.with_mask_token += usize::from(masked);
        summary.thoughts_left_out += row.checked.reasoning_left_out;
        summary.calls_left_out += row.checked.calls_left_out;
        summary.recorded_calls += row.checked.recorded_calls;
        summary.untrained += row.checked.untrained;
        summary.outside_their_prompt += row.checked.prompt_mismatch_earlier;
        match row.agrees {
            Some(true) => summary.tags_agree = summary.tags_agree.map(|count| count + 1),
            Some(false) if summary.first_disagreement.is_none() => {
                summary.first_disagreement = Some(format!("{}:{line}", file.display()));
            }
            _ => {}
        }
    }
}
