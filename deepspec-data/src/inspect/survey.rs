//! All rows, looked at on all cores.

use std::collections::HashSet;
use std::fmt;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use deepspec_core::cli::Verbosity;
use deepspec_core::jsonl::{self, RawLine, RawLines};
use deepspec_core::progress::Progress;
use deepspec_text::Problem;
use rayon::prelude::*;
use serde::Serialize;

use super::row::{Examined, Outcome, examine};
use super::settings::Settings;
use super::summary::{Lengths, Summary};

/// Rows looked at between two reports of progress; bounds the text held at once.
const BATCH: usize = 1024;

/// Something wrong with a row.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// The file.
    pub file: PathBuf,
    /// 1-based line number.
    pub line: usize,
    /// The row's id, if it has one.
    pub id: Option<String>,
    /// What is wrong.
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

/// What was found in all rows.
#[derive(Debug, Default)]
pub struct Survey {
    /// Counts.
    pub summary: Summary,
    /// Every problem, in input order.
    pub findings: Vec<Finding>,
}

impl Survey {
    /// Looks at every row of `files`.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn of(files: &[PathBuf], settings: &Settings, verbosity: Verbosity) -> anyhow::Result<Self> {
        let mut total = 0;
        for file in files {
            for line in RawLines::open(file)? {
                line?;
                total += 1;
            }
        }
        let mut progress = Progress::new(verbosity, "rows", total, 0);
        let mut survey = Self::default();
        survey.summary.chat_template = settings.template.name.clone();
        survey.summary.max_length = settings.max_length;
        survey.summary.tags_agree = settings.other.as_ref().map(|_| 0);
        let (mut seen, mut lengths) = (HashSet::new(), Vec::new());
        each_batch(files, BATCH, |file, lines| {
            let facts: Vec<(usize, Facts)> = lines
                .par_iter()
                .map(|line| (line.number, Facts::of(examine(settings, line.parse(file)), settings)))
                .collect();
            for (line, facts) in facts {
                survey.add(file, line, facts, &mut seen, &mut lengths);
            }
            progress.add(lines.len() as u64, String::new);
            Ok(ControlFlow::Continue(()))
        })?;
        progress.finish();
        survey.summary.lengths = Lengths::of(lengths);
        Ok(survey)
    }

    /// Adds a problem.
    pub fn find(&mut self, file: &Path, line: usize, id: Option<String>, reason: String) {
        self.findings.push(Finding { file: file.to_path_buf(), line, id, reason });
    }

    /// Adds a row; an id belongs to the first usable row that has it.
    fn add(
        &mut self,
        file: &Path,
        line: usize,
        facts: Facts,
        seen: &mut HashSet<String>,
        lengths: &mut Vec<u32>,
    ) {
        self.summary.rows += 1;
        let row = match facts {
            Facts::Failed => {
                self.summary.status_error += 1;
                return;
            }
            Facts::Unusable(id, reason) => {
                self.summary.unusable += 1;
                return self.find(file, line, id, reason);
            }
            Facts::Row(row) => row,
        };
        if !seen.insert(row.id.clone()) {
            self.summary.unusable += 1;
            return self.find(file, line, Some(row.id), "the id was used by an earlier row".into());
        }
        lengths.push(row.length);
        self.count(file, line, &row);
        for problem in row.problems {
            self.find(file, line, Some(row.id.clone()), problem.to_string());
        }
    }

    fn count(&mut self, file: &Path, line: usize, row: &RowFacts) {
        let summary = &mut self.summary;
        let any = |kind: fn(&Problem) -> bool| usize::from(row.problems.iter().any(kind));
        summary.empty_masks += any(|problem| matches!(problem, Problem::Empty { .. }));
        summary.other_words += any(|problem| {
            matches!(problem, Problem::Stray { .. } | Problem::Missing { .. } | Problem::Rewritten { .. })
        });
        summary.other_prompts +=
            any(|problem| matches!(problem, Problem::Served { .. } | Problem::Unservable { .. }));
        match (row.problems.is_empty(), row.too_short) {
            (false, _) => summary.with_problems += 1,
            (true, true) => summary.too_short += 1,
            (true, false) => summary.good += 1,
        }
        summary.cut += usize::from(row.cut);
        summary.tokens += row.tokens;
        summary.supervised_tokens += row.supervised;
        summary.default_system += usize::from(row.default_system);
        summary.thoughts_left_out += row.thoughts_left_out;
        summary.outside_their_prompt += row.outside_their_prompt;
        match row.agrees {
            Some(true) => summary.tags_agree = summary.tags_agree.map(|count| count + 1),
            Some(false) if summary.first_disagreement.is_none() => {
                summary.first_disagreement = Some(format!("{}:{line}", file.display()));
            }
            _ => {}
        }
    }
}

/// What is kept of a row, without its text.
enum Facts {
    Row(RowFacts),
    Failed,
    Unusable(Option<String>, String),
}

struct RowFacts {
    id: String,
    /// Tokens before the cut.
    length: u32,
    tokens: u64,
    supervised: u64,
    cut: bool,
    too_short: bool,
    default_system: bool,
    problems: Vec<Problem>,
    thoughts_left_out: usize,
    outside_their_prompt: usize,
    agrees: Option<bool>,
}

impl Facts {
    fn of(outcome: Outcome, settings: &Settings) -> Self {
        let row = match outcome {
            Outcome::Failed => return Self::Failed,
            Outcome::Unusable(id, reason) => return Self::Unusable(id, reason),
            Outcome::Row(row) => *row,
        };
        let (cut, too_short, lacks_system) = (row.is_cut(), row.is_too_short(), row.lacks_system());
        let Examined { id, supervised, checked, agrees, .. } = row;
        Self::Row(RowFacts {
            id,
            length: u32::try_from(supervised.untruncated_len).unwrap_or(u32::MAX),
            tokens: supervised.input_ids.len() as u64,
            supervised: supervised.supervised_count() as u64,
            cut,
            too_short,
            default_system: lacks_system && settings.template.default_system.is_some(),
            problems: checked.problems,
            thoughts_left_out: checked.thoughts_left_out,
            outside_their_prompt: checked.outside_their_prompt,
            agrees,
        })
    }
}

/// Calls `visit` with some lines at a time, until it breaks off.
///
/// # Errors
/// Those of `visit`, and if a file cannot be read.
pub fn each_batch(
    files: &[PathBuf],
    size: usize,
    mut visit: impl FnMut(&Path, &[RawLine]) -> anyhow::Result<ControlFlow<()>>,
) -> anyhow::Result<()> {
    for file in files {
        for batch in jsonl::batches(file, size)? {
            if visit(file, &batch?)?.is_break() {
                return Ok(());
            }
        }
    }
    Ok(())
}
