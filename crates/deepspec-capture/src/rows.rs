//! Converts JSONL rows to samples with token ids and supervised spans, and counts all unused rows.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::cache::PlannedSample;
use deepspec_core::cli::count;
use deepspec_core::jsonl::{self, Line};
use deepspec_core::row::{self, UniqueIds};
use deepspec_text::{
    ChatTokenizer, Conversation, MIN_SUPERVISED_TOKENS, Served, detect_served_thinking, supervise,
};
use rayon::prelude::*;
use serde_json::{Map, Value};

use crate::{StatesError, TargetSpec};

/// Number of rows tokenised between two progress reports; it limits the text in memory.
const ROWS_PER_BATCH: usize = 4096;
/// Number of first rows that are checked for answers generated with thinking on.
const THINKING_CHECK_ROWS: usize = 64;

/// An unusable line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// The file.
    pub file: PathBuf,
    /// 1-based line, or row of a parquet file.
    pub line: usize,
    /// The reason.
    pub reason: String,
}

/// Counts of rows: `read` is the sum of kept, failed, too short and rejected rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RowCounts {
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
    /// Further unusable lines without details.
    pub unnamed: usize,
    /// Kept rows that were truncated to the maximal length.
    pub cut: usize,
    /// Number of tokens in kept rows.
    pub tokens: u64,
    /// Number of supervised tokens in kept rows.
    pub supervised_tokens: u64,
    /// Kept rows with the token ids that a server generated.
    pub served: usize,
    /// Number of those kept rows whose text would be tokenised to other ids.
    pub served_otherwise: usize,
}

/// The counts as a sum.
impl fmt::Display for RowCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { read, kept, failed, too_short, .. } = self;
        write!(
            f,
            "{} = {kept} kept + {failed} with status error + {too_short} with fewer than {MIN_SUPERVISED_TOKENS} supervised tokens + {} rejected",
            count(*read, "row"),
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

impl RowCounts {
    /// Number of unusable lines, with and without details.
    pub fn rejected(&self) -> usize {
        self.rejected.len() + self.unnamed
    }

    /// Counts a row.
    fn count_row(&mut self, file: &Path, line: usize, outcome: Outcome) -> Option<PlannedSample> {
        self.read += 1;
        match outcome {
            Outcome::Failed => self.failed += 1,
            Outcome::TooShort => self.too_short += 1,
            Outcome::Bad(reason) => self.rejected.push(Rejected { file: file.to_path_buf(), line, reason }),
            Outcome::Kept { sample, cut, served } => {
                self.kept += 1;
                self.cut += usize::from(cut);
                self.served += usize::from(served != Served::Unknown);
                self.served_otherwise += usize::from(served == Served::DiffersFromText);
                self.tokens += u64::from(sample.length());
                self.supervised_tokens += u64::from(sample.supervised_count());
                return Some(sample);
            }
        }
        None
    }
}

/// The samples of files, in input order.
#[derive(Debug, Default)]
pub struct TokenisedRows {
    /// The samples of the kept rows.
    pub samples: Vec<PlannedSample>,
    /// Counts of used and unused rows.
    pub report: RowCounts,
}

/// Tokenises the rows of `files` on all cores and returns all samples. A row is one conversation:
/// `{"id", "conversations", "tools"?, "status"?}`. Ids are made unique over all files. `progress`
/// is called with the number of lines just processed.
///
/// # Errors
/// Fails if a file cannot be read. Bad rows are counted in [`RowCounts::rejected`].
pub fn tokenise(
    files: &[PathBuf],
    source: &TargetSpec,
    progress: impl FnMut(usize),
) -> Result<TokenisedRows, StatesError> {
    let mut samples = Vec::new();
    let report = for_each_sample(files, source, progress, |sample| {
        samples.push(sample);
        Ok(())
    })?;
    Ok(TokenisedRows { samples, report })
}

/// Like [`tokenise`], but passes the samples to `keep` in input order. Only 16 bytes of each
/// earlier sample stay in memory.
pub(crate) fn for_each_sample(
    files: &[PathBuf],
    source: &TargetSpec,
    mut progress: impl FnMut(usize),
    mut keep: impl FnMut(PlannedSample) -> Result<(), StatesError>,
) -> Result<RowCounts, StatesError> {
    let mut report = RowCounts::default();
    let mut ids = UniqueIds::default();
    let mut thought = 0;
    for batch in jsonl::line_batches_of_files(files, ROWS_PER_BATCH) {
        let (file, batch) = batch?;
        let lines: Vec<Line> = batch.into_par_iter().map(|line| line.parse(file)).collect();
        let first = report.read;
        let parsed =
            lines.into_iter().enumerate().map(|(place, line)| parse_line(line, first + place, &mut ids));
        let parsed: Vec<_> = parsed.collect();
        if first < THINKING_CHECK_ROWS {
            thought += parsed
                .iter()
                .take(THINKING_CHECK_ROWS - first)
                .filter(|(_, row)| has_thinking_prompt(row, source))
                .count();
        }
        progress(parsed.len());
        let outcomes: Vec<_> =
            parsed.into_par_iter().map(|(line, row)| (line, tokenise_row(row, source))).collect();
        for (line, outcome) in outcomes {
            report.count_row(file, line, outcome).map_or(Ok(()), &mut keep)?;
        }
    }
    ids.report();
    if thought > 0 {
        tracing::warn!(
            "{thought} of the first {} rows were answered with thinking on; measure a drafter that is trained on them with `deepspec-eval run \
             --thinking on`, for its default is off",
            report.read.min(THINKING_CHECK_ROWS)
        );
    }
    Ok(report)
}

/// Whether a row has a prompt that enabled thinking.
fn has_thinking_prompt(row: &Parsed, source: &TargetSpec) -> bool {
    let Parsed::Row(_, conversation) = row else { return false };
    detect_served_thinking(&source.tokenizer, conversation).is_ok_and(|thinking| thinking == Some(true))
}

/// A parsed row: a conversation, or the reason why there is none.
enum Parsed {
    Row(String, Conversation),
    Failed,
    Bad(String),
}

/// Result of a row.
enum Outcome {
    Kept { sample: PlannedSample, cut: bool, served: Served },
    Failed,
    TooShort,
    Bad(String),
}

/// Parses the line at index `place`. Must be called in input order, because the first usable row
/// with an id keeps it.
fn parse_line(line: Line, place: usize, ids: &mut UniqueIds) -> (usize, Parsed) {
    let (number, fields) = match line {
        Line::Row(number, fields) => (number, fields),
        Line::Bad(bad) => return (bad.line, Parsed::Bad(bad.problem)),
    };
    if fields.get("status").is_some_and(|status| status == "error") {
        return (number, Parsed::Failed);
    }
    let parsed = match read_conversation(&fields) {
        Ok((id, conversation)) => Parsed::Row(ids.assign_id(id.as_deref(), place), conversation),
        Err(reason) => Parsed::Bad(reason),
    };
    (number, parsed)
}

/// Names a token id outside the target's embedding of `vocab_size` rows, if there is one.
pub fn unknown_token(tokenizer: &ChatTokenizer, ids: &[i64], vocab_size: usize) -> Option<String> {
    let id = *ids.iter().find(|&&id| id as usize >= vocab_size)?;
    let token = tokenizer.token(id).unwrap_or_default();
    Some(format!("token {token:?} has the id {id}, and the target's embedding {vocab_size} rows"))
}

fn read_conversation(fields: &Map<String, Value>) -> Result<(Option<String>, Conversation), String> {
    let id = row::optional_id(fields)?;
    let conversation = Conversation::from_row(fields).map_err(|error| error.to_string())?;
    Ok((id, conversation))
}

fn tokenise_row(row: Parsed, source: &TargetSpec) -> Outcome {
    let (id, conversation) = match row {
        Parsed::Row(id, conversation) => (id, conversation),
        Parsed::Failed => return Outcome::Failed,
        Parsed::Bad(reason) => return Outcome::Bad(reason),
    };
    let max_length = source.identity.max_length;
    match supervise(&source.tokenizer, &source.template, &conversation, max_length) {
        Err(error) => Outcome::Bad(error.to_string().replace('\n', " ")),
        Ok(found)
            if let Some(problem) =
                unknown_token(&source.tokenizer, &found.input_ids, source.identity.vocab_size) =>
        {
            Outcome::Bad(problem)
        }
        Ok(found) if found.supervised_count() < MIN_SUPERVISED_TOKENS => Outcome::TooShort,
        Ok(found) => {
            let sample = PlannedSample {
                id,
                spans: found.spans(),
                // Token ids are below the target's vocabulary size, as checked above.
                input_ids: found.input_ids.iter().map(|&id| id as i32).collect(),
            };
            let (cut, served) = (found.untruncated_len > found.input_ids.len(), found.served);
            let fitted = match &source.answers {
                Some(answers) => answers.fit(sample, source.reads_last_token_state),
                None => Ok(sample),
            };
            match fitted {
                Ok(sample) if (sample.supervised_count() as usize) < MIN_SUPERVISED_TOKENS => {
                    Outcome::TooShort
                }
                Ok(sample) => Outcome::Kept { sample, cut, served },
                Err(problem) => Outcome::Bad(problem),
            }
        }
    }
}
