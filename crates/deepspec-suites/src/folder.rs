//! Prompt suites: which are asked for, and their rows.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use deepspec_core::jsonl::{Line, Reader, kind_of};
use deepspec_core::suite::record::{self, Record};
use deepspec_core::suite::{Class, Domain, SUITES, Suite};
use deepspec_core::{digest, row, usage};
use serde_json::{Map, Value};

use crate::mersenne;

/// A folder of suites, with what is recorded of it.
pub struct Folder<'a> {
    dir: &'a Path,
    record: Record,
}

impl<'a> Folder<'a> {
    /// Opens a folder.
    ///
    /// # Errors
    /// Usage errors: no such folder, a record that cannot be read.
    pub fn open(dir: &'a Path) -> anyhow::Result<Self> {
        if !dir.is_dir() {
            usage!("the suites folder {} does not exist; name it with --suites-dir", dir.display());
        }
        Ok(Self { dir, record: Record::read(dir)? })
    }

    /// The suites to run, in the order of tables: those named, and those that stand for the domains. Without names and
    /// domains it is all domains together. Suites of the user's own follow, and are run only when they are named.
    ///
    /// # Errors
    /// Usage errors: an unknown name, no file.
    pub fn select(&self, names: &[String], domains: &[Domain]) -> anyhow::Result<Vec<Suite>> {
        let own: Vec<Suite> = self.record.user_suites().collect();
        if let Some(unknown) = names.iter().find(|name| self.record.suite(name).is_none()) {
            let known: Vec<&str> = SUITES.iter().chain(&own).map(|suite| suite.name.as_ref()).collect();
            usage!(
                "`{unknown}` is no suite; the suites are {}; `deepspec-data suites --description` adds one of your own",
                known.join(", ")
            );
        }
        let groups: Vec<&[Domain]> = if names.is_empty() && domains.is_empty() {
            vec![&Domain::ALL]
        } else {
            domains.chunks(1).collect()
        };
        let mut wanted: Vec<&str> = names.iter().map(String::as_str).collect();
        for group in groups {
            wanted.extend(stand_ins(self.dir, group));
        }
        let asked = SUITES.iter().chain(&own).filter(|suite| wanted.contains(&suite.name.as_ref()));
        let selected: Vec<Suite> = asked.cloned().collect();
        match selected.iter().find(|suite| !suite.path(self.dir).is_file()) {
            Some(missing) => usage!(
                "{} does not exist; `deepspec-data suites` fetches the public suites, --suites-dir names another folder",
                missing.path(self.dir).display()
            ),
            None => Ok(selected),
        }
    }
}

/// What is scored for these domains: the published suites as far as their files are there, or the smoke suites where there
/// is none of them.
fn stand_ins(dir: &Path, domains: &[Domain]) -> Vec<&'static str> {
    let of = |wanted: fn(&Suite) -> bool| {
        SUITES.iter().filter(move |suite| domains.contains(&suite.domain) && wanted(suite))
    };
    let names =
        |suites: &[&'static Suite]| suites.iter().map(|suite| suite.name.as_ref()).collect::<Vec<_>>();
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
    /// What the user says, turn by turn; at least one.
    pub turns: Vec<String>,
}

/// A suite as read from its file.
#[derive(Debug)]
pub struct Rows {
    /// Which suite.
    pub suite: Suite,
    /// Its file.
    pub path: PathBuf,
    /// SHA-256 of the file.
    pub digest: String,
    /// Rows in the file.
    pub total: usize,
    /// The rows to score, in order.
    pub samples: Vec<Sample>,
}

impl Folder<'_> {
    /// Reads a suite. With more rows than the suite's cap, the first ones of CPython's shuffle are scored; `limit` takes
    /// fewer. A file that is not the one recorded is scored all the same, with a warning.
    ///
    /// # Errors
    /// Usage errors that name file and line: a malformed row, an id that occurs twice, no rows.
    pub fn load(&self, suite: Suite, seed: u64, limit: Option<usize>) -> anyhow::Result<Rows> {
        let path = suite.path(self.dir);
        let mut samples = samples(&path)?;
        let total = samples.len();
        if total == 0 {
            usage!("{}: the suite has no rows", path.display());
        }
        if let Some(cap) = suite.cap().filter(|&cap| cap < total) {
            mersenne::shuffle(&mut samples, seed);
            samples.truncate(cap);
        }
        samples.truncate(limit.unwrap_or(usize::MAX));
        let digest = digest::file(&path)?;
        if let Some(entry) =
            self.record.suites.get(suite.name.as_ref()).filter(|entry| entry.sha256 != digest)
        {
            let (found, recorded) = (digest::short(&digest), digest::short(&entry.sha256));
            tracing::warn!(
                "{} is not the file that {} records (sha256 {found}, recorded {recorded}): its scores are those of \
                 another suite",
                path.display(),
                record::FILE
            );
        }
        Ok(Rows { suite, digest, path, total, samples })
    }
}

fn samples(path: &Path) -> anyhow::Result<Vec<Sample>> {
    let (mut samples, mut lines) = (vec![], HashMap::new());
    for line in Reader::open(path)? {
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
    Ok(samples)
}

fn sample(row: &Map<String, Value>, index: usize) -> Result<Sample, String> {
    let id = if row.contains_key("id") { row::id_of(row)? } else { index.to_string() };
    let turns = match row.get("turns") {
        Some(Value::Array(turns)) => turns,
        Some(other) => return Err(format!("`turns` must be an array of texts, found {}", kind_of(other))),
        None => return Err("the row has no `turns`".into()),
    };
    let texts = turns.iter().enumerate().map(|(turn, text)| match text {
        Value::String(text) if !text.trim().is_empty() => Ok(text.clone()),
        Value::String(_) => Err(format!("turn {} of `turns` is blank", turn + 1)),
        other => Err(format!("turn {} of `turns` must be a text, found {}", turn + 1, kind_of(other))),
    });
    let turns: Vec<String> = texts.collect::<Result<_, _>>()?;
    if turns.is_empty() {
        return Err("`turns` is empty".into());
    }
    Ok(Sample { id, turns })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn load(dir: &Path, name: &str, seed: u64, limit: Option<usize>) -> anyhow::Result<Rows> {
        let folder = Folder::open(dir).unwrap();
        let suite = folder.record.suite(name).unwrap();
        folder.load(suite, seed, limit)
    }

    #[test]
    fn a_capped_suite_is_cut_after_cpythons_shuffle() {
        let dir = tempfile::tempdir().unwrap();
        let rows: String = (0..1319).map(|i| format!("{{\"turns\":[\"question {i}\"]}}\n")).collect();
        fs::write(dir.path().join("gsm8k.jsonl"), &rows).unwrap();
        fs::write(dir.path().join("aime24.jsonl"), &rows).unwrap();
        let ids = |suite, limit| {
            let rows = load(dir.path(), suite, 980_406, limit).unwrap();
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
            let error = load(dir.path(), "aime24", 0, None).unwrap_err().to_string();
            error.rsplit_once("aime24.jsonl:").unwrap().1.to_string()
        };
        let good = "{\"id\":1,\"turns\":[\"a\"]}\n";
        assert!(problem(&format!("{good}{{oops\n")).starts_with("2: not valid JSON"));
        assert_eq!(problem(&format!("{good}\n{good}")), "3: the id `1` is that of line 1 too");
        assert_eq!(problem("{\"id\":1}"), "1: the row has no `turns`");
        assert_eq!(problem("{\"turns\":\"a\"}"), "1: `turns` must be an array of texts, found a string");
        assert_eq!(problem("{\"turns\":[]}"), "1: `turns` is empty");
        assert_eq!(problem("{\"turns\":[\"a\",\" \"]}"), "1: turn 2 of `turns` is blank");
        assert_eq!(problem("{\"turns\":[{}]}"), "1: turn 1 of `turns` must be a text, found an object");
        assert_eq!(
            problem("{\"id\":null,\"turns\":[\"a\"]}"),
            "1: `id` must be a non-empty string or an integer, found null"
        );
        assert_eq!(problem("\n"), " the suite has no rows");
    }

    #[test]
    fn published_suites_win_over_smoke_suites() {
        let dir = tempfile::tempdir().unwrap();
        let names = |asked: &[&str], domains: &[Domain]| {
            let asked: Vec<String> = asked.iter().map(ToString::to_string).collect();
            let selected = Folder::open(dir.path()).unwrap().select(&asked, domains);
            selected
                .map(|suites| suites.into_iter().map(|suite| suite.name).collect::<Vec<_>>())
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

    #[test]
    fn recorded_suites_are_run_when_they_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let rows: String = (0..9).map(|i| format!("{{\"turns\": [\"question {i}\"]}}\n")).collect();
        for name in ["mine", "gsm8k"] {
            fs::write(dir.path().join(format!("{name}.jsonl")), &rows).unwrap();
        }
        let mut record = Record::default();
        let source = record::Origin::Files(vec![]);
        let (sha256, converter) = (digest::bytes(rows.as_bytes()), "description 12".to_string());
        let entry = record::Entry { domain: Domain::Chat, rows: 9, cap: Some(4), source, sha256, converter };
        record.suites.insert("mine".into(), entry);
        record.write(dir.path()).unwrap();

        let folder = Folder::open(dir.path()).unwrap();
        let names = |asked: &[&str]| {
            let asked: Vec<String> = asked.iter().map(ToString::to_string).collect();
            let suites = folder.select(&asked, &[]).map_err(|error| error.to_string())?;
            Ok::<_, String>(suites.into_iter().map(|suite| suite.name).collect::<Vec<_>>())
        };
        assert_eq!(names(&["mine", "gsm8k"]).unwrap(), ["gsm8k", "mine"]);
        assert_eq!(names(&[]).unwrap(), ["gsm8k"], "averages are over the published suites alone");
        assert!(names(&["yours"]).unwrap_err().contains("smoke-chat, mine;"));
        let rows = load(dir.path(), "mine", 980_406, None).unwrap();
        assert_eq!((rows.suite.domain, rows.total, rows.samples.len()), (Domain::Chat, 9, 4));
    }
}
