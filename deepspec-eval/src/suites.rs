//! Prompt suites: which are known, which are asked for, and their rows.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

use deepspec_core::jsonl::{Line, Reader, kind_of};
use deepspec_core::{digest, row, usage};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::mersenne;

/// What a suite's prompts are about; scores are averaged over the suites of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Domain {
    /// Word problems and competitions.
    Math,
    /// Programming.
    Code,
    /// Open conversation.
    Chat,
}

impl Domain {
    /// All of them, in the order of tables.
    pub const ALL: [Self; 3] = [Self::Math, Self::Code, Self::Chat];
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Math => "math",
            Self::Code => "code",
            Self::Chat => "chat",
        })
    }
}

/// Why a suite is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    /// Part of the published table, over at most this many rows.
    Published(usize),
    /// Supported by the reference, not published.
    Extra,
    /// Our own small one, for the toy target.
    Smoke,
}

/// A suite by name.
#[derive(Debug)]
pub struct Suite {
    /// Its name; the file is `NAME.jsonl`.
    pub name: &'static str,
    /// Its domain.
    pub domain: Domain,
    class: Class,
}

const fn suite(name: &'static str, domain: Domain, class: Class) -> Suite {
    Suite { name, domain, class }
}

static SUITES: [Suite; 15] = [
    suite("gsm8k", Domain::Math, Class::Published(500)),
    suite("math500", Domain::Math, Class::Published(500)),
    suite("aime25", Domain::Math, Class::Published(30)),
    suite("aime24", Domain::Math, Class::Extra),
    suite("smoke-math", Domain::Math, Class::Smoke),
    suite("mbpp", Domain::Code, Class::Published(256)),
    suite("humaneval", Domain::Code, Class::Published(164)),
    suite("livecodebench", Domain::Code, Class::Published(500)),
    suite("lbpp", Domain::Code, Class::Extra),
    suite("swe-bench", Domain::Code, Class::Extra),
    suite("smoke-code", Domain::Code, Class::Smoke),
    suite("mt-bench", Domain::Chat, Class::Published(80)),
    suite("alpaca", Domain::Chat, Class::Published(500)),
    suite("arena-hard-v2", Domain::Chat, Class::Published(500)),
    suite("smoke-chat", Domain::Chat, Class::Smoke),
];

impl Suite {
    /// Rows that are scored, if there are more.
    fn cap(&self) -> Option<usize> {
        match self.class {
            Class::Published(cap) => Some(cap),
            Class::Extra | Class::Smoke => None,
        }
    }

    fn path(&self, dir: &Path) -> PathBuf {
        dir.join(format!("{}.jsonl", self.name))
    }
}

/// The suites to run, in the order of tables: those named, and those that stand for the domains. Without names and domains
/// it is all domains together.
///
/// # Errors
/// Usage errors: no such folder, an unknown name, no file.
pub fn select(dir: &Path, names: &[String], domains: &[Domain]) -> anyhow::Result<Vec<&'static Suite>> {
    if !dir.is_dir() {
        usage!("the suites folder {} does not exist; name it with --suites-dir", dir.display());
    }
    if let Some(unknown) = names.iter().find(|name| SUITES.iter().all(|suite| suite.name != name.as_str())) {
        let known: Vec<&str> = SUITES.iter().map(|suite| suite.name).collect();
        usage!("`{unknown}` is no suite; the suites are {}", known.join(", "));
    }
    let groups: Vec<&[Domain]> =
        if names.is_empty() && domains.is_empty() { vec![&Domain::ALL] } else { domains.chunks(1).collect() };
    let mut wanted: Vec<&str> = names.iter().map(String::as_str).collect();
    for group in groups {
        wanted.extend(stand_ins(dir, group));
    }
    let selected: Vec<&Suite> = SUITES.iter().filter(|suite| wanted.contains(&suite.name)).collect();
    match selected.iter().find(|suite| !suite.path(dir).is_file()) {
        Some(missing) => usage!(
            "{} does not exist; `deepspec-data suites` fetches the public suites, --suites-dir names another folder",
            missing.path(dir).display()
        ),
        None => Ok(selected),
    }
}

/// What is scored for these domains: the published suites as far as their files are there, or the smoke suites where there
/// is none of them.
fn stand_ins(dir: &Path, domains: &[Domain]) -> Vec<&'static str> {
    let of = |wanted: fn(&Suite) -> bool| {
        SUITES.iter().filter(move |suite| domains.contains(&suite.domain) && wanted(suite))
    };
    let names = |suites: &[&'static Suite]| suites.iter().map(|suite| suite.name).collect::<Vec<_>>();
    let (there, missing): (Vec<_>, Vec<_>) =
        of(|suite| matches!(suite.class, Class::Published(_))).partition(|suite| suite.path(dir).is_file());
    if there.is_empty() {
        let smoke = names(&of(|suite| suite.class == Class::Smoke).collect::<Vec<_>>());
        tracing::info!("no published suite in {}: scoring {}", dir.display(), smoke.join(", "));
        return smoke;
    }
    let (there, missing) = (names(&there), names(&missing));
    tracing::info!("scoring {}", there.join(", "));
    if !missing.is_empty() {
        tracing::warn!(
            "no {} in {}: averages leave them out, unlike the published ones",
            missing.join(", "),
            dir.display()
        );
    }
    there
}

/// One prompt of a suite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// The row's id, or its place in the file, from 0.
    pub id: String,
    /// What the user says first.
    pub prompt: String,
}

/// A suite as read from its file.
#[derive(Debug)]
pub struct Rows {
    /// Which suite.
    pub suite: &'static Suite,
    /// Its file.
    pub path: PathBuf,
    /// SHA-256 of the file.
    pub digest: String,
    /// Rows in the file.
    pub total: usize,
    /// The rows to score, in order.
    pub samples: Vec<Sample>,
}

/// Reads a suite. With more rows than the suite's cap, the first ones of CPython's shuffle are scored; `limit` takes fewer.
///
/// # Errors
/// Usage errors that name file and line: a malformed row, an id that occurs twice, no rows.
pub fn load(suite: &'static Suite, dir: &Path, seed: u64, limit: Option<usize>) -> anyhow::Result<Rows> {
    let path = suite.path(dir);
    let (mut samples, mut lines) = (vec![], HashMap::new());
    for line in Reader::open(&path)? {
        let (number, row) = match line? {
            Line::Row(number, row) => (number, row),
            Line::Bad(bad) => usage!("{bad}"),
        };
        let sample = match sample(&row, samples.len()) {
            Ok(sample) => sample,
            Err(problem) => usage!("{}:{number}: {problem}", path.display()),
        };
        if let Some(first) = lines.insert(sample.id.clone(), number) {
            usage!("{}:{number}: the id `{}` is that of line {first} too", path.display(), sample.id);
        }
        samples.push(sample);
    }
    let total = samples.len();
    if total == 0 {
        usage!("{}: the suite has no rows", path.display());
    }
    if let Some(cap) = suite.cap().filter(|&cap| cap < total) {
        mersenne::shuffle(&mut samples, seed);
        samples.truncate(cap);
    }
    samples.truncate(limit.unwrap_or(usize::MAX));
    Ok(Rows { suite, digest: digest::file(&path)?, path, total, samples })
}

fn sample(row: &Map<String, Value>, index: usize) -> Result<Sample, String> {
    let id = if row.contains_key("id") { row::id_of(row)? } else { index.to_string() };
    let turns = match row.get("turns") {
        Some(Value::Array(turns)) => turns,
        Some(other) => return Err(format!("`turns` must be an array of texts, found {}", kind_of(other))),
        None => return Err("the row has no `turns`".into()),
    };
    match turns.first() {
        Some(Value::String(prompt)) if !prompt.trim().is_empty() => Ok(Sample { id, prompt: prompt.clone() }),
        Some(Value::String(_)) => Err("the first of `turns` is blank".into()),
        Some(other) => Err(format!("the first of `turns` must be a text, found {}", kind_of(other))),
        None => Err("`turns` is empty".into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn known(name: &str) -> &'static Suite {
        SUITES.iter().find(|suite| suite.name == name).unwrap()
    }

    #[test]
    fn a_capped_suite_is_cut_after_cpythons_shuffle() {
        let dir = tempfile::tempdir().unwrap();
        let rows: String = (0..1319).map(|i| format!("{{\"turns\":[\"question {i}\"]}}\n")).collect();
        fs::write(dir.path().join("gsm8k.jsonl"), &rows).unwrap();
        fs::write(dir.path().join("aime24.jsonl"), &rows).unwrap();
        let ids = |suite, limit| {
            let rows = load(known(suite), dir.path(), 980_406, limit).unwrap();
            let ids: Vec<String> = rows.samples.into_iter().map(|sample| sample.id).collect();
            (rows.total, ids)
        };
        let (total, capped) = ids("gsm8k", None);
        assert_eq!((total, capped.len()), (1319, 500));
        assert_eq!(capped[..8], ["435", "902", "303", "1168", "403", "611", "608", "977"]);
        assert_eq!(ids("gsm8k", Some(3)).1, capped[..3]);
        assert_eq!(ids("aime24", Some(3)).1, ["0", "1", "2"]);
    }

    #[test]
    fn bad_rows_are_named_by_line() {
        let dir = tempfile::tempdir().unwrap();
        let problem = |text: &str| {
            fs::write(dir.path().join("aime24.jsonl"), text).unwrap();
            let error = load(known("aime24"), dir.path(), 0, None).unwrap_err().to_string();
            error.rsplit_once("aime24.jsonl:").unwrap().1.to_string()
        };
        let good = "{\"id\":1,\"turns\":[\"a\"]}\n";
        assert!(problem(&format!("{good}{{oops\n")).starts_with("2: not valid JSON"));
        assert_eq!(problem(&format!("{good}\n{good}")), "3: the id `1` is that of line 1 too");
        assert_eq!(problem("{\"id\":1}"), "1: the row has no `turns`");
        assert_eq!(problem("{\"turns\":\"a\"}"), "1: `turns` must be an array of texts, found a string");
        assert_eq!(problem("{\"turns\":[]}"), "1: `turns` is empty");
        assert_eq!(problem("{\"turns\":[{}]}"), "1: the first of `turns` must be a text, found an object");
        assert_eq!(
            problem("{\"id\":null,\"turns\":[\"a\"]}"),
            "1: `id` must be a non-empty string or a number, found null"
        );
        assert_eq!(problem("\n"), " the suite has no rows");
    }

    #[test]
    fn published_suites_win_over_smoke_suites() {
        let dir = tempfile::tempdir().unwrap();
        let names = |asked: &[&str], domains: &[Domain]| {
            let asked: Vec<String> = asked.iter().map(ToString::to_string).collect();
            let selected = select(dir.path(), &asked, domains);
            selected
                .map(|suites| suites.iter().map(|suite| suite.name).collect::<Vec<_>>())
                .map_err(|e| e.to_string())
        };
        for name in ["smoke-math", "smoke-code", "smoke-chat"] {
            fs::write(dir.path().join(format!("{name}.jsonl")), "").unwrap();
        }
        assert_eq!(names(&[], &[]).unwrap(), ["smoke-math", "smoke-code", "smoke-chat"]);
        assert_eq!(names(&["smoke-chat"], &[Domain::Math]).unwrap(), ["smoke-math", "smoke-chat"]);
        assert!(names(&["gsm8k"], &[]).unwrap_err().contains("gsm8k.jsonl does not exist"));
        assert!(names(&["gsm9k"], &[]).unwrap_err().contains("`gsm9k` is no suite"));
        fs::write(dir.path().join("gsm8k.jsonl"), "").unwrap();
        assert_eq!(names(&[], &[]).unwrap(), ["gsm8k"]);
        assert_eq!(names(&[], &[Domain::Chat, Domain::Math]).unwrap(), ["gsm8k", "smoke-chat"]);
        assert_eq!(names(&["smoke-math"], &[]).unwrap(), ["smoke-math"]);
    }
}
