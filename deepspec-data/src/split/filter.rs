//! Which rows are usable, and what is wrong with the others.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use deepspec_core::atomic::FileError;
use fixedbitset::FixedBitSet;

use super::contamination::{Hit, Suites};
use super::conversation::{Conversation, Kind, Problem};
use super::seen::{self, Seen};
use crate::rejects::Recorder;
use deepspec_states::Rejected;

/// Speakers that are counted by name; in a file of garbage they could be as many as the rows.
const SPEAKERS: usize = 1000;

/// Where the messages of further speakers are counted.
const OTHERS: &str = "(others)";

/// Contaminated rows of a suite that the report shows.
const EXAMPLES: usize = 10;

/// One bit a row: whether it is usable.
#[derive(Default)]
pub struct Bits(FixedBitSet);

impl Bits {
    fn push(&mut self, bit: bool) {
        let at = self.0.len();
        self.0.grow(at + 1);
        self.0.set(at, bit);
    }

    /// The bit of a row; None behind the last one.
    pub fn get(&self, at: usize) -> Option<bool> {
        (at < self.0.len()).then(|| self.0.contains(at))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// What became of the rows of one source before any were drawn.
#[derive(Default)]
pub struct Found {
    /// Which rows are usable.
    pub usable: Bits,
    /// How many are.
    pub usable_rows: usize,
    /// Unusable rows by kind of problem.
    pub rejected: BTreeMap<Kind, usize>,
    /// Rows whose prompts an earlier row has.
    pub duplicates: usize,
    /// Rows whose prompts stand in a suite, a number for each suite.
    pub contaminated: Vec<usize>,
    /// Messages of usable rows that were dropped, by speaker.
    pub dropped: BTreeMap<String, usize>,
}

impl Found {
    /// Nothing yet, where prompts are looked up in so many suites.
    pub fn new(suites: usize) -> Self {
        Self { contaminated: vec![0; suites], ..Self::default() }
    }

    /// All rows that were read.
    pub fn rows(&self) -> usize {
        self.usable.len()
    }

    /// Rows that were rejected.
    pub fn rejected_rows(&self) -> usize {
        self.rejected.values().sum()
    }
}

/// A contaminated row, to be looked at.
pub struct Example {
    /// Its file.
    pub file: Arc<Path>,
    /// Its line or row.
    pub line: usize,
    /// Where its prompt stands.
    pub hit: Hit,
}

/// What decides about rows, one at a time and in their order.
pub struct RowFilter<'a> {
    prompts: Option<Seen>,
    recorder: &'a mut Recorder,
    /// The first contaminated rows of each suite.
    pub examples: Vec<Vec<Example>>,
}

/// What can be said of a row without knowing the others.
pub struct Judged {
    line: usize,
    verdict: Result<Good, Problem>,
}

/// A row that is a conversation.
struct Good {
    /// Its id, unless it is its index.
    id: Option<String>,
    prompt: u64,
    hit: Option<Hit>,
    dropped: Vec<String>,
}

/// What is looked for in every row.
#[derive(Clone, Copy)]
pub struct Judge<'a> {
    /// Prompts that must not be in the output.
    pub suites: &'a Suites,
    /// Whether prompts that occurred before are left out.
    pub dedup: bool,
}

impl Judge<'_> {
    /// Looks at one row.
    pub fn judge(
        &self,
        line: usize,
        row: &mut Result<Conversation, Problem>,
        scratch: &mut Vec<u8>,
    ) -> Judged {
        let row = match row {
            Ok(row) => row,
            Err(problem) => return Judged { line, verdict: Err(problem.clone()) },
        };
        let prompt = if self.dedup {
            row.prompt(scratch);
            seen::hash(scratch)
        } else {
            0
        };
        let hit = self.suites.find(row, scratch);
        let dropped = std::mem::take(&mut row.dropped);
        Judged { line, verdict: Ok(Good { id: row.id.own().map(str::to_owned), prompt, hit, dropped }) }
    }
}

impl<'a> RowFilter<'a> {
    /// Nothing was seen yet.
    pub fn new(judge: &Judge<'_>, recorder: &'a mut Recorder) -> Self {
        let examples = judge.suites.suites().iter().map(|_| vec![]).collect();
        Self { prompts: judge.dedup.then(Seen::new), recorder, examples }
    }

    /// Decides what becomes of the next row of a source; whether it is usable.
    pub fn settle(
        &mut self,
        file: &Arc<Path>,
        row: Judged,
        ids: &mut Ids,
        found: &mut Found,
    ) -> Result<bool, FileError> {
        let Judged { line, verdict } = row;
        let usable = match verdict.and_then(|good| ids.check(good, &found.usable)) {
            Err(problem) => {
                *found.rejected.entry(problem.kind).or_default() += 1;
                self.recorder.add(&Rejected { file: file.to_path_buf(), line, reason: problem.text })?;
                false
            }
            Ok((Good { hit: Some(hit), .. }, _)) => {
                found.contaminated[hit.suite] += 1;
                let examples = &mut self.examples[hit.suite];
                if examples.len() < EXAMPLES {
                    examples.push(Example { file: Arc::clone(file), line, hit });
                }
                false
            }
            Ok((good, _)) if self.prompts.as_mut().is_some_and(|seen| !seen.insert(good.prompt)) => {
                found.duplicates += 1;
                false
            }
            Ok((good, id)) => {
                ids.claim(id);
                good.dropped.into_iter().for_each(|speaker| count(&mut found.dropped, speaker));
                found.usable_rows += 1;
                true
            }
        };
        found.usable.push(usable);
        Ok(usable)
    }
}

fn count(speakers: &mut BTreeMap<String, usize>, speaker: String) {
    let full = speakers.len() >= SPEAKERS && !speakers.contains_key(&speaker);
    *speakers.entry(if full { OTHERS.into() } else { speaker }).or_default() += 1;
}

/// Ids of a source's usable rows, to see that each is given once. As long as no row brings an id of its own, they are the rows'
/// places and nothing needs to be remembered.
#[derive(Default)]
pub struct Ids {
    claimed: Option<Seen>,
}

impl Ids {
    fn of_index(index: usize) -> u64 {
        seen::hash(index.to_string().as_bytes())
    }

    /// The hash of the next row's id, if it has to be remembered.
    fn check(&mut self, good: Good, usable: &Bits) -> Result<(Good, Option<u64>), Problem> {
        let index = usable.len();
        if good.id.is_some() && self.claimed.is_none() {
            let mut claimed = Seen::new();
            let earlier = (0..index).filter(|&row| usable.get(row) == Some(true));
            earlier.for_each(|row| {
                claimed.insert(Self::of_index(row));
            });
            self.claimed = Some(claimed);
        }
        let Some(claimed) = &self.claimed else { return Ok((good, None)) };
        let hash = good.id.as_ref().map_or_else(|| Self::of_index(index), |id| seen::hash(id.as_bytes()));
        if claimed.contains(hash) {
            let id = good.id.as_deref().map_or_else(|| index.to_string(), shown);
            return Err(Kind::IdTwice.because(format!("id `{id}` was used by an earlier row")));
        }
        Ok((good, Some(hash)))
    }

    fn claim(&mut self, hash: Option<u64>) {
        if let (Some(claimed), Some(hash)) = (&mut self.claimed, hash) {
            claimed.insert(hash);
        }
    }
}

/// An id in a message: on one line, and not longer than one.
fn shown(id: &str) -> String {
    id.chars().take(80).flat_map(char::escape_debug).collect()
}
