//! Decides which rows are usable, and records why the remaining rows are not.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use deepspec_core::atomic::FileError;
use deepspec_core::row::UniqueIds;
use fixedbitset::FixedBitSet;

use super::contamination::{SuiteMatch, Suites};
use super::conversation::{Conversation, Problem, ProblemKind};
use super::dedup::{self, HashSet64};
use crate::rejected_rows::Recorder;
use deepspec_capture::Rejected;

/// Maximum number of speakers that are counted by name. A malformed file could have one per row.
const MAX_COUNTED_SPEAKERS: usize = 1000;

/// Name under which all further speakers are counted.
const OTHER_SPEAKERS: &str = "(others)";

/// Maximum number of contaminated rows per suite in the report.
const MAX_EXAMPLES: usize = 10;

/// One bit per row: whether it is usable.
#[derive(Default)]
pub struct UsableRows(FixedBitSet);

impl UsableRows {
    fn push(&mut self, bit: bool) {
        let at = self.0.len();
        self.0.grow(at + 1);
        self.0.set(at, bit);
    }

    /// The bit of a row; None after the last row.
    pub fn get(&self, at: usize) -> Option<bool> {
        (at < self.0.len()).then(|| self.0.contains(at))
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// Result of the first pass over one source.
#[derive(Default)]
pub struct SourceFindings {
    /// Which rows are usable.
    pub usable: UsableRows,
    /// Number of usable rows.
    pub usable_rows: usize,
    /// Unusable rows by kind of problem.
    pub rejected: BTreeMap<ProblemKind, usize>,
    /// Rows whose prompt repeats an earlier one.
    pub duplicates: usize,
    /// Number of contaminated rows, by suite.
    pub contaminated: Vec<usize>,
    /// Messages of usable rows that were dropped, by speaker.
    pub dropped: BTreeMap<String, usize>,
    /// Hash of each row's first user turn.
    pub asked: Vec<u64>,
    /// New ids of rows that repeat an earlier id, by row index.
    pub renamed: HashMap<usize, String>,
}

impl SourceFindings {
    /// An empty result for this number of suites.
    pub fn new(suites: usize) -> Self {
        Self { contaminated: vec![0; suites], ..Self::default() }
    }

    /// Number of rows read.
    pub fn rows(&self) -> usize {
        self.usable.len()
    }

    /// Number of unusable rows.
    pub fn rejected_rows(&self) -> usize {
        self.rejected.values().sum()
    }
}

/// A contaminated row for the report.
pub struct Example {
    /// The row's file.
    pub file: Arc<Path>,
    /// The row's line or index in the file.
    pub line: usize,
    /// The match in a suite.
    pub hit: SuiteMatch,
}

/// Decides whether rows are usable, one by one in order.
pub struct RowFilter<'a> {
    prompts: Option<HashSet64>,
    recorder: &'a mut Recorder,
    /// The first contaminated rows of each suite.
    pub examples: Vec<Vec<Example>>,
}

/// Result of [`RowMatcher::hash_and_match`].
pub struct MatchedRow {
    line: usize,
    verdict: Result<ValidRow, Problem>,
}

/// A row that parsed as a conversation.
struct ValidRow {
    /// The id in the row; None if the row has no id.
    id: Option<String>,
    prompt: u64,
    asked: u64,
    hit: Option<SuiteMatch>,
    dropped: Vec<String>,
}

/// Hashes rows and compares them with the evaluation suites, one row at a time.
#[derive(Clone, Copy)]
pub struct RowMatcher<'a> {
    /// Suites whose prompts are excluded.
    pub suites: &'a Suites,
    /// Whether repeated prompts are dropped.
    pub dedup: bool,
}

impl RowMatcher<'_> {
    /// Hashes a row's prompt for deduplication and finds the evaluation prompt that it repeats. [`RowFilter`] decides.
    pub fn hash_and_match(
        &self,
        line: usize,
        row: &mut Result<Conversation, Problem>,
        scratch: &mut Vec<u8>,
    ) -> MatchedRow {
        let row = match row {
            Ok(row) => row,
            Err(problem) => return MatchedRow { line, verdict: Err(problem.clone()) },
        };
        let prompt = if self.dedup {
            row.write_prompt_key(scratch);
            dedup::hash(scratch)
        } else {
            0
        };
        row.write_first_user_turn(scratch);
        let asked = dedup::hash(scratch);
        let hit = self.suites.find(row, scratch);
        let dropped = std::mem::take(&mut row.dropped);
        MatchedRow {
            line,
            verdict: Ok(ValidRow { id: row.id.own().map(str::to_owned), prompt, asked, hit, dropped }),
        }
    }
}

impl<'a> RowFilter<'a> {
    /// A filter that has not seen any row.
    pub fn new(matcher: &RowMatcher<'_>, recorder: &'a mut Recorder) -> Self {
        let examples = matcher.suites.suites().iter().map(|_| vec![]).collect();
        Self { prompts: matcher.dedup.then(HashSet64::new), recorder, examples }
    }

    /// Decides about the next row of a source. Returns whether the row is usable and unchanged.
    pub fn decide(
        &mut self,
        file: &Arc<Path>,
        row: MatchedRow,
        ids: &mut IdRenamer,
        found: &mut SourceFindings,
    ) -> Result<bool, FileError> {
        let MatchedRow { line, verdict } = row;
        let index = found.usable.len();
        let asked = verdict.as_ref().map_or(0, |good| good.asked);
        let (usable, as_read) = match verdict {
            Err(problem) => {
                *found.rejected.entry(problem.kind).or_default() += 1;
                self.recorder.add(&Rejected { file: file.to_path_buf(), line, reason: problem.text })?;
                (false, false)
            }
            Ok(ValidRow { hit: Some(hit), .. }) => {
                found.contaminated[hit.suite] += 1;
                let examples = &mut self.examples[hit.suite];
                if examples.len() < MAX_EXAMPLES {
                    examples.push(Example { file: Arc::clone(file), line, hit });
                }
                (false, false)
            }
            Ok(good) if self.prompts.as_mut().is_some_and(|seen| !seen.insert(good.prompt)) => {
                found.duplicates += 1;
                (false, false)
            }
            Ok(good) => {
                let renamed = ids.deduplicate_id(good.id.as_deref(), &found.usable);
                let as_read = renamed.is_none();
                found.renamed.extend(renamed.map(|name| (index, name)));
                good.dropped.into_iter().for_each(|speaker| count(&mut found.dropped, speaker));
                found.usable_rows += 1;
                (true, as_read)
            }
        };
        found.usable.push(usable);
        found.asked.push(asked);
        Ok(as_read)
    }
}

fn count(speakers: &mut BTreeMap<String, usize>, speaker: String) {
    let full = speakers.len() >= MAX_COUNTED_SPEAKERS && !speakers.contains_key(&speaker);
    *speakers.entry(if full { OTHER_SPEAKERS.into() } else { speaker }).or_default() += 1;
}

/// Makes ids of a source's usable rows unique. Until a row with an id in its fields occurs, all ids are row indices and
/// none is stored.
#[derive(Default)]
pub struct IdRenamer {
    given: Option<UniqueIds>,
}

impl IdRenamer {
    /// A new id for the next row, if an earlier row has the same id; `usable` are the rows before
    /// it.
    fn deduplicate_id(&mut self, own: Option<&str>, usable: &UsableRows) -> Option<String> {
        let index = usable.len();
        if own.is_some() && self.given.is_none() {
            let mut given = UniqueIds::default();
            (0..index)
                .filter(|&row| usable.get(row) == Some(true))
                .for_each(|row| drop(given.assign_id(None, row)));
            self.given = Some(given);
        }
        let name = self.given.as_mut()?.assign_id(own, index);
        let meant = own.map_or_else(|| index.to_string(), str::to_owned);
        (name != meant).then_some(name)
    }
}
