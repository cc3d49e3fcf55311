//! Which rows are usable, and what is wrong with the others.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use deepspec_core::atomic::FileError;
use deepspec_core::row::UniqueIds;
use fixedbitset::FixedBitSet;

use super::contamination::{Hit, Suites};
use super::conversation::{Conversation, Kind, Problem};
use super::dedup::{self, Seen};
use crate::rejected_rows::Recorder;
use deepspec_capture::Rejected;

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
    /// What the user asks in each row, as a hash.
    pub asked: Vec<u64>,
    /// What rows are called whose id an earlier row has, by their place.
    pub renamed: HashMap<usize, String>,
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
    asked: u64,
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
            dedup::hash(scratch)
        } else {
            0
        };
        row.asked(scratch);
        let asked = dedup::hash(scratch);
        let hit = self.suites.find(row, scratch);
        let dropped = std::mem::take(&mut row.dropped);
        Judged {
            line,
            verdict: Ok(Good { id: row.id.own().map(str::to_owned), prompt, asked, hit, dropped }),
        }
    }
}

impl<'a> RowFilter<'a> {
    /// Nothing was seen yet.
    pub fn new(judge: &Judge<'_>, recorder: &'a mut Recorder) -> Self {
        let examples = judge.suites.suites().iter().map(|_| vec![]).collect();
        Self { prompts: judge.dedup.then(Seen::new), recorder, examples }
    }

    /// Decides what becomes of the next row of a source; whether it is usable as it was read.
    pub fn settle(
        &mut self,
        file: &Arc<Path>,
        row: Judged,
        ids: &mut Ids,
        found: &mut Found,
    ) -> Result<bool, FileError> {
        let Judged { line, verdict } = row;
        let index = found.usable.len();
        let asked = verdict.as_ref().map_or(0, |good| good.asked);
        let (usable, as_read) = match verdict {
            Err(problem) => {
                *found.rejected.entry(problem.kind).or_default() += 1;
                self.recorder.add(&Rejected { file: file.to_path_buf(), line, reason: problem.text })?;
                (false, false)
            }
            Ok(Good { hit: Some(hit), .. }) => {
                found.contaminated[hit.suite] += 1;
                let examples = &mut self.examples[hit.suite];
                if examples.len() < EXAMPLES {
                    examples.push(Example { file: Arc::clone(file), line, hit });
                }
                (false, false)
            }
            Ok(good) if self.prompts.as_mut().is_some_and(|seen| !seen.insert(good.prompt)) => {
                found.duplicates += 1;
                (false, false)
            }
            Ok(good) => {
                let renamed = ids.rename(good.id.as_deref(), &found.usable);
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
    let full = speakers.len() >= SPEAKERS && !speakers.contains_key(&speaker);
    *speakers.entry(if full { OTHERS.into() } else { speaker }).or_default() += 1;
}

/// Ids of a source's usable rows, to see that each is given once. As long as no row brings an id of its own, they are the rows'
/// places and nothing needs to be remembered.
#[derive(Default)]
pub struct Ids {
    given: Option<UniqueIds>,
}

impl Ids {
    /// What the next row is called where an earlier one has its id, or its place for an id; `usable` are the rows before it.
    fn rename(&mut self, own: Option<&str>, usable: &Bits) -> Option<String> {
        let index = usable.len();
        if own.is_some() && self.given.is_none() {
            let mut given = UniqueIds::default();
            (0..index)
                .filter(|&row| usable.get(row) == Some(true))
                .for_each(|row| drop(given.name(None, row)));
            self.given = Some(given);
        }
        let name = self.given.as_mut()?.name(own, index);
        let meant = own.map_or_else(|| index.to_string(), str::to_owned);
        (name != meant).then_some(name)
    }
}
