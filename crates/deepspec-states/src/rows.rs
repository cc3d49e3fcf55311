//! JSONL rows become samples: token ids, supervised spans, and an account of every row that did not.

use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};

use deepspec_cache::PlannedSample;
use deepspec_core::digest;
use deepspec_core::jsonl::{self, Line};
use deepspec_core::row;
use deepspec_text::{Conversation, MIN_SUPERVISED_TOKENS, Served, supervise};
use rayon::prelude::*;
use serde_json::{Map, Value};

use crate::{StatesError, TargetBundle};

/// Rows tokenised between two reports of progress; bounds the text held at once.
const BATCH: usize = 4096;

/// A line without a usable row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// The file.
    pub file: PathBuf,
    /// 1-based line, or row of a parquet file.
    pub line: usize,
    /// What is wrong with it.
    pub reason: String,
}

/// What became of the rows: `read` is the sum of kept, failed, too short and rejected ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Lines that are not blank.
    pub read: usize,
    /// Rows that became samples.
    pub kept: usize,
    /// Rows left out because their status is `error`.
    pub failed: usize,
    /// Rows left out because fewer than [`MIN_SUPERVISED_TOKENS`] tokens are supervised.
    pub too_short: usize,
    /// Unusable lines, in input order.
    pub rejected: Vec<Rejected>,
    /// Further unusable lines, of which nothing more is known.
    pub unnamed: usize,
    /// Kept rows that were cut at the maximal length.
    pub cut: usize,
    /// Tokens of the kept rows.
    pub tokens: u64,
    /// Supervised tokens of the kept rows.
    pub supervised_tokens: u64,
    /// Kept rows whose tokens are those that a server generated.
    pub served: usize,
    /// Of these, the ones whose text comes apart into other tokens.
    pub served_otherwise: usize,
}

/// What became of the rows, as a sum.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { read, kept, failed, too_short, .. } = self;
        write!(
            f,
            "{read} rows = {kept} kept + {failed} with status error + {too_short} with fewer than {MIN_SUPERVISED_TOKENS} supervised tokens + {} rejected",
            self.rejected()
        )?;
        match self.served {
            0 => Ok(()),
            served => write!(
                f,
                "; {served} keep the tokens that were served, in {} of them other ones than their text's",
                self.served_otherwise
            ),
        }
    }
}

impl Report {
    /// Unusable lines, with and without a name.
    pub fn rejected(&self) -> usize {
        self.rejected.len() + self.unnamed
    }

    /// Counts a row.
    fn add(&mut self, file: &Path, line: usize, outcome: Outcome) -> Option<PlannedSample> {
        self.read += 1;
        match outcome {
            Outcome::Failed => self.failed += 1,
            Outcome::TooShort => self.too_short += 1,
            Outcome::Bad(reason) => self.rejected.push(Rejected { file: file.to_path_buf(), line, reason }),
            Outcome::Kept { sample, cut, served } => {
                self.kept += 1;
                self.cut += usize::from(cut);
                self.served += usize::from(served != Served::Unknown);
                self.served_otherwise += usize::from(served == Served::Otherwise);
                self.tokens += u64::from(sample.length());
                self.supervised_tokens += u64::from(sample.supervised());
                return Some(sample);
            }
        }
        None
    }
}

/// The samples of some files, in input order.
#[derive(Debug, Default)]
pub struct Tokenised {
    /// Ready for a plan.
    pub samples: Vec<PlannedSample>,
    /// What became of the rows.
    pub report: Report,
}

/// Tokenises the rows of `files` on all cores and keeps all samples. Rows of one conversation each: `{"id", "conversations", "tools"?, "status"?}`; ids
/// are unique over all files. `progress` is called with the number of lines just dealt with.
///
/// # Errors
/// If a file cannot be read; bad rows are [`Report::rejected`].
pub fn tokenise(
    files: &[PathBuf],
    source: &TargetBundle,
    progress: impl FnMut(usize),
) -> Result<Tokenised, StatesError> {
    let mut samples = Vec::new();
    let report = for_each_sample(files, source, progress, |sample| {
        samples.push(sample);
        Ok(())
    })?;
    Ok(Tokenised { samples, report })
}

/// As [`tokenise`], but `keep` gets the samples, in input order: of those before nothing is held but 16 bytes each.
pub(crate) fn for_each_sample(
    files: &[PathBuf],
    source: &TargetBundle,
    mut progress: impl FnMut(usize),
    mut keep: impl FnMut(PlannedSample) -> Result<(), StatesError>,
) -> Result<Report, StatesError> {
    let mut report = Report::default();
    let mut seen = HashSet::new();
    for batch in jsonl::batches_of(files, BATCH) {
        let (file, batch) = batch?;
        let lines: Vec<Line> = batch.into_par_iter().map(|line| line.parse(file)).collect();
        let parsed: Vec<_> = lines.into_iter().map(|line| parse(line, &mut seen)).collect();
        progress(parsed.len());
        let outcomes: Vec<_> =
            parsed.into_par_iter().map(|(line, row)| (line, sample(row, source))).collect();
        for (line, outcome) in outcomes {
            report.add(file, line, outcome).map_or(Ok(()), &mut keep)?;
        }
    }
    Ok(report)
}

/// A row's conversation, or what else it is.
enum Parsed {
    Row(String, Conversation),
    Failed,
    Bad(String),
}

/// What a row gave.
enum Outcome {
    Kept { sample: PlannedSample, cut: bool, served: Served },
    Failed,
    TooShort,
    Bad(String),
}

/// Reads a line; in input order, because an id belongs to the first usable row that has it.
fn parse(line: Line, seen: &mut HashSet<u128>) -> (usize, Parsed) {
    let (number, fields) = match line {
        Line::Row(number, fields) => (number, fields),
        Line::Bad(bad) => return (bad.line, Parsed::Bad(bad.problem)),
    };
    if fields.get("status").is_some_and(|status| status == "error") {
        return (number, Parsed::Failed);
    }
    let parsed = match usable(&fields) {
        Ok((id, conversation)) if seen.insert(digest::fingerprint(id.as_bytes())) => {
            Parsed::Row(id, conversation)
        }
        Ok((id, _)) => Parsed::Bad(format!("id `{id}` was used by an earlier row")),
        Err(reason) => Parsed::Bad(reason),
    };
    (number, parsed)
}

fn usable(fields: &Map<String, Value>) -> Result<(String, Conversation), String> {
    let id = row::id_of(fields)?;
    let conversation = Conversation::from_row(fields).map_err(|error| error.to_string())?;
    Ok((id, conversation))
}

fn sample(row: Parsed, source: &TargetBundle) -> Outcome {
    let (id, conversation) = match row {
        Parsed::Row(id, conversation) => (id, conversation),
        Parsed::Failed => return Outcome::Failed,
        Parsed::Bad(reason) => return Outcome::Bad(reason),
    };
    let max_length = source.identity.max_length;
    match supervise(&source.tokenizer, &source.template, &conversation, max_length) {
        Err(error) => Outcome::Bad(error.to_string().replace('\n', " ")),
        Ok(found) if found.supervised_count() < MIN_SUPERVISED_TOKENS => Outcome::TooShort,
        Ok(found) => Outcome::Kept {
            cut: found.untruncated_len > found.input_ids.len(),
            served: found.served,
            sample: PlannedSample {
                id,
                spans: found.spans(),
                // The tokenizer's ids are 32-bit numbers below the target's vocabulary: `TargetBundle::open` has compared them.
                input_ids: found.input_ids.iter().map(|&id| id as i32).collect(),
            },
        },
    }
}
