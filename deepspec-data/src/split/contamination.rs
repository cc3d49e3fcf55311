//! Finds prompts of evaluation suites in training data, which would inflate the suites' scores.
//!
//! A row is contaminated if a user turn equals a suite's turn, up to white space, or shares 13
//! words in a row with one. Words are compared without case and punctuation. Most published
//! decontaminations use 13 words: shorter runs are common phrases, longer ones miss edited
//! questions.
//!
//! A suite's prompt template is not part of its questions. Words that all its first turns begin or
//! end with are removed, if they are at least eight. Runs of 13 words in three or more of a suite's
//! rows are ignored.

mod words;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use anyhow::Context;
use deepspec_core::digest;
use deepspec_core::jsonl::json_type_name;
use serde_json::{Map, Value};

use super::conversation::Conversation;
use super::dedup;
use deepspec_datasets::rows::{DatasetFiles, RowItem};
use words::hash_word_runs;

/// Minimum number of words that all first turns share at the start or end, to count as a prompt
/// template.
const MIN_TEMPLATE_WORDS: usize = 8;

/// A run of words is ignored if it occurs in at least this many rows of a suite.
const COMMON_PHRASE_ROWS: usize = 3;

/// An evaluation suite to exclude from training data.
pub struct Suite {
    /// File of the suite.
    pub path: PathBuf,
    /// SHA-256 of the file, in hexadecimal.
    pub digest: String,
    /// Number of its rows.
    pub rows: usize,
}

/// A match of a row's prompt in a suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SuiteMatch {
    /// Index of the suite.
    pub suite: usize,
    /// 1-based line of the suite's file.
    pub line: usize,
    /// The type of the match.
    pub shared: MatchKind,
}

/// The type of a match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatchKind {
    /// A user turn equals a turn of the suite, up to white space.
    Turn,
    /// Thirteen words in a row are equal.
    Words,
}

impl MatchKind {
    /// The name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Turn => "turn",
            Self::Words => "13_words",
        }
    }
}

/// The index of all suites.
#[derive(Default)]
pub struct Suites {
    suites: Vec<Suite>,
    turns: HashMap<u64, SuiteMatch>,
    runs: HashMap<u64, SuiteMatch>,
}

impl Suites {
    /// Reads suite files, JSONL rows of `{"turns": [text, …]}`.
    ///
    /// # Errors
    /// If a file cannot be read, has no rows, or has a row that is malformed; the error names the
    /// line.
    pub fn load(paths: &[PathBuf]) -> anyhow::Result<Self> {
        let mut all = Self::default();
        for path in paths {
            let prompts = read_prompts(path)?;
            anyhow::ensure!(!prompts.is_empty(), "--decontaminate {}: the suite has no rows", path.display());
            let digest = digest::sha256_of_file(path)?;
            all.add(Suite { path: path.clone(), digest, rows: prompts.len() }, &prompts);
        }
        Ok(all)
    }

    /// The suites, in the order given.
    pub fn suites(&self) -> &[Suite] {
        &self.suites
    }

    fn add(&mut self, suite: Suite, prompts: &[Prompt]) {
        let index = self.suites.len();
        self.suites.push(suite);
        let (front, back) = shared_prefix_and_suffix_words(prompts);
        let mut runs: HashMap<u64, (usize, usize)> = HashMap::new();
        for prompt in prompts {
            let mut own = HashSet::new();
            for (position, turn) in prompt.turns.iter().enumerate() {
                let words: Vec<&str> = turn.split_whitespace().collect();
                let question = match position {
                    0 => words[front..words.len() - back].join(" "),
                    _ => words.join(" "),
                };
                for text in [words.join(" "), question.clone()].iter().filter(|text| !text.is_empty()) {
                    let hit = SuiteMatch { suite: index, line: prompt.line, shared: MatchKind::Turn };
                    self.turns.entry(dedup::hash(text.as_bytes())).or_insert(hit);
                }
                own.extend(self::hash_word_runs(&question));
            }
            own.into_iter().for_each(|run| runs.entry(run).or_insert((0, prompt.line)).0 += 1);
        }
        for (run, (_, line)) in runs.into_iter().filter(|(_, (rows, _))| *rows < COMMON_PHRASE_ROWS) {
            self.runs.entry(run).or_insert(SuiteMatch { suite: index, line, shared: MatchKind::Words });
        }
    }

    /// The first match of a user turn of `row`.
    pub fn find(&self, row: &Conversation, scratch: &mut Vec<u8>) -> Option<SuiteMatch> {
        if self.suites.is_empty() {
            return None;
        }
        row.user_turns().find_map(|turn| {
            scratch.clear();
            for word in turn.split_whitespace() {
                if !scratch.is_empty() {
                    scratch.push(b' ');
                }
                scratch.extend_from_slice(word.as_bytes());
            }
            let whole = self.turns.get(&dedup::hash(scratch));
            whole.copied().or_else(|| hash_word_runs(turn).find_map(|run| self.runs.get(&run).copied()))
        })
    }
}

/// A suite's row, with its turns.
struct Prompt {
    line: usize,
    turns: Vec<String>,
}

fn read_prompts(path: &Path) -> anyhow::Result<Vec<Prompt>> {
    let rows = DatasetFiles::from_files(vec![path.to_path_buf()]).and_then(|source| source.rows());
    let prompt = |RowItem { line, row }| match row.and_then(|row| parse_turns(&row)) {
        Ok(turns) => Ok(Prompt { line, turns }),
        Err(problem) => anyhow::bail!("{}:{line}: {problem}", path.display()),
    };
    rows.context("--decontaminate")?.map(|item| prompt(item?)).collect()
}

fn parse_turns(row: &Map<String, Value>) -> Result<Vec<String>, String> {
    let expected = "--decontaminate expects evaluation suites, rows of {\"turns\": [text, …]}";
    let turns = match row.get("turns") {
        Some(Value::Array(turns)) if !turns.is_empty() => turns,
        other => {
            let found = other.map_or("nothing", json_type_name);
            return Err(format!("`turns` must be a list of texts, found {found}; {expected}"));
        }
    };
    let text = |turn: &Value| turn.as_str().map(str::to_owned);
    turns.iter().map(text).collect::<Option<_>>().ok_or_else(|| format!("a turn is not a string; {expected}"))
}

/// Counts the words that all first turns share at the start, and at the end. A count below
/// `MIN_TEMPLATE_WORDS` becomes 0. The two counts are 0 if together they cover a whole turn.
fn shared_prefix_and_suffix_words(prompts: &[Prompt]) -> (usize, usize) {
    let firsts: Vec<Vec<&str>> = prompts
        .iter()
        .filter_map(|prompt| Some(prompt.turns.first()?.split_whitespace().collect()))
        .collect();
    let Some((first, others)) = firsts.split_first().filter(|(_, others)| !others.is_empty()) else {
        return (0, 0);
    };
    let same = |words: &[&str]| first.iter().zip(words).take_while(|(a, b)| a == b).count();
    let same_back =
        |words: &[&str]| first.iter().rev().zip(words.iter().rev()).take_while(|(a, b)| a == b).count();
    let shared = |count: Option<usize>| count.filter(|&words| words >= MIN_TEMPLATE_WORDS).unwrap_or(0);
    let front = shared(others.iter().map(|words| same(words)).min());
    let back = shared(others.iter().map(|words| same_back(words)).min());
    let shortest = firsts.iter().map(Vec::len).min().unwrap_or(0);
    if front + back < shortest { (front, back) } else { (0, 0) }
}

#[cfg(test)]
mod tests {
    use super::super::conversation::Id;
    use super::*;
    use deepspec_text::Role;

    fn suites(files: &[&[&str]]) -> Suites {
        let mut all = Suites::default();
        for rows in files {
            let turns = |(at, row): (usize, &&str)| Prompt {
                line: at + 1,
                turns: row.split('|').map(str::to_owned).collect(),
            };
            let prompts: Vec<Prompt> = rows.iter().enumerate().map(turns).collect();
            all.add(Suite { path: "s".into(), digest: String::new(), rows: rows.len() }, &prompts);
        }
        all
    }

    fn find(suites: &Suites, turns: &[&str]) -> Option<(usize, usize, MatchKind)> {
        let mut row = Conversation::new(Id::Index, vec![]);
        for turn in turns {
            let turn =
                super::super::conversation::Turn { role: Role::User, text: (*turn).into(), rest: vec![] };
            row.turns.push(turn);
        }
        suites.find(&row, &mut vec![]).map(|hit| (hit.suite, hit.line, hit.shared))
    }

    const LONG: &str =
        "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.";

    #[test]
    fn turns_and_runs_of_words_are_found() {
        let suites = suites(&[&["What is 2+2?|And 3?"], &[LONG, "What is 2-2?"]]);
        assert_eq!(find(&suites, &["hello", " What  is\n2+2? "]), Some((0, 1, MatchKind::Turn)));
        assert_eq!(find(&suites, &["And 3?"]), Some((0, 1, MatchKind::Turn)));
        assert_eq!(find(&suites, &["What is 2-2?"]), Some((1, 2, MatchKind::Turn)));
        assert_eq!(find(&suites, &["what is 2*2?"]), None);
        let edited = "Solve: natalia SOLD clips to 48 of her friends in April and then she slept";
        assert_eq!(find(&suites, &[edited]), Some((1, 1, MatchKind::Words)));
        assert_eq!(
            find(&suites, &["Natalia sold clips to 48 of her friends in April, and then slept"]),
            None
        );
        assert_eq!(find(&Suites::default(), &[LONG]), None);
    }

    #[test]
    fn what_surrounds_every_question_is_not_the_question() {
        let end = "\nPlease reason step by step, and put your final answer within \\boxed{}.";
        let rows =
            [format!("What is 7*8?{end}"), format!("{LONG}{end}"), format!("How many seashells?{end}")];
        let suites = suites(&[&[&rows[0], &rows[1], &rows[2]]]);
        // Another question in the same prompt template, with the same last word as one of the
        // suite's questions.
        assert_eq!(find(&suites, &[&format!("Where are my seashells?{end}")]), None);
        assert_eq!(find(&suites, &[&rows[2]]), Some((0, 3, MatchKind::Turn)));
        assert_eq!(find(&suites, &["How many seashells?"]), Some((0, 3, MatchKind::Turn)));
        assert_eq!(find(&suites, &[LONG]), Some((0, 2, MatchKind::Turn)));
    }

    #[test]
    fn phrases_of_a_suite_do_not_count() {
        let phrase = "you are given the source of a repository and an issue that asks for a change";
        let rows: Vec<String> = (0..3).map(|row| format!("{row}: {phrase} of part {row}")).collect();
        let suites = suites(&[&[&rows[0], &rows[1], &rows[2]]]);
        assert_eq!(find(&suites, &[&format!("Now {phrase} again")]), None);
        assert_eq!(find(&suites, &[&rows[1]]), Some((0, 2, MatchKind::Turn)));
        let edited = format!("{phrase} of part 1!");
        assert_eq!(find(&suites, &[&edited]), Some((0, 2, MatchKind::Words)));
    }

    #[test]
    fn files_that_are_no_suites_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let load = |text: &str| {
            let path = dir.path().join("s.jsonl");
            std::fs::write(&path, text).unwrap();
            Suites::load(&[path]).err().unwrap().to_string()
        };
        let error = load("{\"turns\":[\"a\"]}\n{\"turns\":\"a\"}\n");
        assert!(error.contains("s.jsonl:2: `turns` must be a list of texts, found a string"), "{error}");
        assert!(load("{\"turns\":[1]}").contains("not a string"));
        assert!(load("").contains("no rows"));
        assert!(load("x").contains("s.jsonl:1: not valid JSON"));
    }
}
