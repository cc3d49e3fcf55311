//! Selects prompt suites and reads their rows.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::suites::builtin::BUILTIN_SUITES;
use crate::suites::record::{self, Record};
use crate::suites::suite::{Domain, Suite, SuiteClass};
use deepspec_core::jsonl::{Line, Reader, json_type_name};
use deepspec_core::{digest, row, usage};
use serde_json::{Map, Value};

use crate::suites::{file, mersenne};

/// A folder of suites with its record.
pub struct SuiteDir<'a> {
    dir: &'a Path,
    record: Record,
}

impl<'a> SuiteDir<'a> {
    /// Opens a folder. It need not exist if all suites are files elsewhere.
    ///
    /// # Errors
    /// Fails with a usage error if the record cannot be read.
    pub fn open(dir: &'a Path) -> anyhow::Result<Self> {
        Ok(Self { dir, record: Record::read(dir)? })
    }

    /// Selects the suites in `names` and the default suites of `domains`, in the order of the
    /// built-in list. Without names and domains it selects the default suites of all domains.
    /// Suites described by the user follow, and run only if they are named. Files (`names` that end
    /// with .jsonl) come last, in the given order.
    ///
    /// # Errors
    /// Fails with a usage error if the folder or a file does not exist, a name is unknown, or two
    /// suites have one name.
    pub fn select(&self, names: &[String], domains: &[Domain]) -> anyhow::Result<Vec<Suite>> {
        let (files, mut wanted): (Vec<&str>, Vec<&str>) = names
            .iter()
            .map(String::as_str)
            .partition(|name| file::is_file(name) && self.record.suite(name).is_none());
        let of_folder = !wanted.is_empty() || !domains.is_empty() || files.is_empty();
        if of_folder && !self.dir.is_dir() {
            usage!("the suites folder {} does not exist; name it with --suites-dir", self.dir.display());
        }
        let own: Vec<Suite> = self.record.user_suites().collect();
        if let Some(unknown) = wanted.iter().find(|name| self.record.suite(name).is_none()) {
            let known: Vec<&str> =
                BUILTIN_SUITES.iter().chain(&own).map(|suite| suite.name.as_str()).collect();
            usage!(
                "`{unknown}` is no suite; the suites are {}; a JSONL file of your own is one too if you name it with its \
                 ending, and `deepspec-data suites --description` makes one of other data",
                known.join(", ")
            );
        }
        let groups: Vec<&[Domain]> = if names.is_empty() && domains.is_empty() {
            vec![&Domain::KNOWN]
        } else {
            domains.chunks(1).collect()
        };
        for group in groups {
            wanted.extend(default_suites(self.dir, group));
        }
        let files =
            files.into_iter().map(|name| self.suite_of_file(name)).collect::<anyhow::Result<Vec<Suite>>>()?;
        // A file may be the file of a known suite.
        wanted.extend(
            files.iter().map(|suite| suite.name.as_str()).filter(|name| self.record.suite(name).is_some()),
        );
        let asked = BUILTIN_SUITES.iter().chain(&own).filter(|suite| wanted.contains(&suite.name.as_str()));
        let mut selected: Vec<Suite> = asked.cloned().collect();
        if let Some(missing) = selected.iter().find(|suite| !suite.path(self.dir).is_file()) {
            usage!(
                "{} does not exist; `deepspec-data suites` fetches the public suites, --suites-dir names another folder",
                missing.path(self.dir).display()
            );
        }
        for suite in files {
            match selected.iter().find(|other| other.name == suite.name) {
                None => selected.push(suite),
                Some(other) if file::is_same_file(&other.path(self.dir), &suite.path(self.dir)) => {}
                Some(other) => usage!(
                    "{} and {} would both be suite `{}`; rename one of them, or score them in two runs",
                    other.path(self.dir).display(),
                    suite.path(self.dir).display(),
                    suite.name
                ),
            }
        }
        Ok(selected)
    }

    /// The suite of a file: a new suite, or the known suite with this file.
    fn suite_of_file(&self, name: &str) -> anyhow::Result<Suite> {
        let suite = file::suite_of_file(name)?;
        let Some(known) = self.record.suite(&suite.name) else { return Ok(suite) };
        let (file, of_known) = (suite.path(self.dir), known.path(self.dir));
        if !file::is_same_file(&file, &of_known) {
            usage!(
                "{} has the name of the suite `{}`, whose file is {}; rename it, or name its folder with --suites-dir and \
                 the suite with --suite {}",
                file.display(),
                known.name,
                of_known.display(),
                known.name
            );
        }
        Ok(known)
    }
}

/// Default suites of these domains: the published suites whose files exist, or the smoke suites if
/// there are none.
fn default_suites(dir: &Path, domains: &[Domain]) -> Vec<&'static str> {
    let of = |wanted: fn(&Suite) -> bool| {
        BUILTIN_SUITES.iter().filter(move |suite| domains.contains(&suite.domain) && wanted(suite))
    };
    let names =
        |suites: &[&'static Suite]| suites.iter().map(|suite| suite.name.as_str()).collect::<Vec<_>>();
    let (there, missing): (Vec<_>, Vec<_>) = of(|suite| matches!(suite.class, SuiteClass::Published(_)))
        .partition(|suite| suite.path(dir).is_file());
    if there.is_empty() {
        let smoke = names(&of(|suite| suite.class == SuiteClass::Smoke).collect::<Vec<_>>());
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
    /// The row's id, or its index in the file, from 0.
    pub id: String,
    /// User messages, turn by turn; at least one.
    pub turns: Vec<String>,
}

/// A suite as read from its file.
#[derive(Debug)]
pub struct SuiteRows {
    /// The suite.
    pub suite: Suite,
    /// File of the suite.
    pub path: PathBuf,
    /// SHA-256 of the file.
    pub digest: String,
    /// Rows in the file.
    pub total: usize,
    /// The rows to score, in order.
    pub samples: Vec<Sample>,
}

impl SuiteDir<'_> {
    /// Reads a suite. If it has more rows than its cap, the first rows after CPython's shuffle are
    /// scored; `limit` takes fewer. A file that differs from the recorded one is scored with a
    /// warning.
    ///
    /// # Errors
    /// Fails with a usage error that names file and line if a row is malformed or an id occurs
    /// twice. Fails if there are no rows.
    pub fn load(&self, suite: Suite, seed: u64, limit: Option<usize>) -> anyhow::Result<SuiteRows> {
        let path = suite.path(self.dir);
        let mut samples = read_samples(&path)?;
        let total = samples.len();
        if total == 0 {
            usage!("{}: the suite has no rows", path.display());
        }
        if let Some(cap) = suite.cap().filter(|&cap| cap < total) {
            mersenne::shuffle(&mut samples, seed);
            samples.truncate(cap);
        }
        samples.truncate(limit.unwrap_or(usize::MAX));
        let digest = digest::sha256_of_file(&path)?;
        if let Some(entry) =
            self.record.suites.get(suite.name.as_str()).filter(|entry| entry.sha256 != digest)
        {
            let (found, recorded) = (digest::short_digest(&digest), digest::short_digest(&entry.sha256));
            tracing::warn!(
                "{} is not the file that {} records (sha256 {found}, recorded {recorded}): its scores are those of \
                 another suite",
                path.display(),
                record::RECORD_FILE
            );
        }
        Ok(SuiteRows { suite, digest, path, total, samples })
    }
}

fn read_samples(path: &Path) -> anyhow::Result<Vec<Sample>> {
    let (mut samples, mut lines) = (vec![], HashMap::new());
    for line in Reader::open(path)? {
        let (number, row) = match line? {
            Line::Row(number, row) => (number, row),
            Line::Bad(bad) => usage!("{bad}"),
        };
        let sample = match parse_sample(&row, samples.len()) {
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

fn parse_sample(row: &Map<String, Value>, index: usize) -> Result<Sample, String> {
    let has_id = row.get("id").is_some_and(|id| !id.is_null());
    let id = if has_id { row::required_id(row)? } else { index.to_string() };
    let turns = match row.get("turns") {
        Some(Value::Array(turns)) => turns,
        Some(other) => {
            return Err(format!("`turns` must be an array of texts, found {}", json_type_name(other)));
        }
        None => {
            return Err(
                "the row has no `turns`; a suite's rows are {\"turns\": [\"…\"]}, which `deepspec-data split` writes as --eval-output"
                    .into(),
            );
        }
    };
    let texts = turns.iter().enumerate().map(|(turn, text)| match text {
        Value::String(text) if !text.trim().is_empty() => Ok(text.clone()),
        Value::String(_) => Err(format!("turn {} of `turns` is blank", turn + 1)),
        other => Err(format!("turn {} of `turns` must be a text, found {}", turn + 1, json_type_name(other))),
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

    #[test]
    fn files_are_suites_wherever_they_lie() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let write = |name: &str, rows: usize| {
            let file = root.join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            let text: String = (0..rows).map(|i| format!("{{\"turns\": [\"question {i}\"]}}\n")).collect();
            fs::write(&file, text).unwrap();
            file.display().to_string()
        };
        let (mine, other) = (write("a/My Prompts.jsonl", 700), write("b/My Prompts.jsonl", 1));
        let (smoke, stray) = (write("suites/smoke-math.jsonl", 2), write("a/smoke-code.jsonl", 1));
        let (nameless, missing) = (write("a/.jsonl", 1), root.join("no.jsonl").display().to_string());
        let suites = root.join("suites");
        let select = |dir: &Path, names: &[&String]| {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            SuiteDir::open(dir).unwrap().select(&names, &[]).map_err(|error| error.to_string())
        };
        // No suites folder is needed. A file named twice is one suite.
        let nowhere = root.join("nowhere");
        let found = select(&nowhere, &[&mine, &mine]).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].name.as_ref(), found[0].domain), ("My Prompts", Domain::Own));
        let rows = SuiteDir::open(&nowhere).unwrap().load(found[0].clone(), 1, None).unwrap();
        assert_eq!((rows.samples.len(), rows.samples[3].id.as_str()), (700, "3"), "all rows, in order");
        assert_eq!(rows.path, Path::new(&mine));
        // Suites of the folder come first, and the file of such a suite is that suite.
        let found = select(&suites, &[&mine, &smoke, &"smoke-math".into()]).unwrap();
        assert_eq!(
            found.iter().map(|suite| suite.name.as_str()).collect::<Vec<_>>(),
            ["smoke-math", "My Prompts"]
        );
        assert_eq!(found[0].class, SuiteClass::Smoke);
        for (names, words) in [
            (vec![&mine, &other], "would both be suite `My Prompts`"),
            (vec![&stray], "has the name of the suite `smoke-code`"),
            (vec![&nameless], "is no name for a suite"),
            (vec![&missing], "no.jsonl does not exist; a suite whose name ends with .jsonl is a file"),
        ] {
            let told = select(&suites, &names).unwrap_err();
            assert!(told.contains(words), "{told}");
        }
        assert!(select(&nowhere, &[&"smoke-math".into()]).unwrap_err().contains("--suites-dir"));
        fs::write(&mine, "{\"turns\": [\"a\"]}\n{\"turn\": \"b\"}\n").unwrap();
        let found = select(&nowhere, &[&mine]).unwrap().remove(0);
        let told = SuiteDir::open(&nowhere).unwrap().load(found, 1, None).unwrap_err().to_string();
        assert!(told.ends_with("My Prompts.jsonl:2: the row has no `turns`; a suite's rows are {\"turns\": [\"…\"]}, which `deepspec-data split` writes as --eval-output"), "{told}");
    }

    fn load(dir: &Path, name: &str, seed: u64, limit: Option<usize>) -> anyhow::Result<SuiteRows> {
        let folder = SuiteDir::open(dir).unwrap();
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
        assert!(problem("{\"id\":1}").starts_with("1: the row has no `turns`"));
        assert_eq!(problem("{\"turns\":\"a\"}"), "1: `turns` must be an array of texts, found a string");
        assert_eq!(problem("{\"turns\":[]}"), "1: `turns` is empty");
        assert_eq!(problem("{\"turns\":[\"a\",\" \"]}"), "1: turn 2 of `turns` is blank");
        assert_eq!(problem("{\"turns\":[{}]}"), "1: turn 1 of `turns` must be a text, found an object");
        fs::write(dir.path().join("aime24.jsonl"), "{\"id\":null,\"turns\":[\"a\"]}").unwrap();
        assert_eq!(load(dir.path(), "aime24", 0, None).unwrap().samples[0].id, "0", "null is no id");
        assert_eq!(
            problem("{\"id\":[1],\"turns\":[\"a\"]}"),
            "1: `id` must be a string or an integer, found an array"
        );
        assert_eq!(problem("\n"), " the suite has no rows");
    }

    #[test]
    fn published_suites_win_over_smoke_suites() {
        let dir = tempfile::tempdir().unwrap();
        let names = |asked: &[&str], domains: &[Domain]| {
            let asked: Vec<String> = asked.iter().map(ToString::to_string).collect();
            let selected = SuiteDir::open(dir.path()).unwrap().select(&asked, domains);
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
        let (sha256, converter) = (digest::sha256_of_bytes(rows.as_bytes()), "description 12".to_string());
        let entry =
            record::SuiteRecord { domain: Domain::Chat, rows: 9, cap: Some(4), source, sha256, converter };
        record.suites.insert("mine".into(), entry);
        record.write(dir.path()).unwrap();

        let folder = SuiteDir::open(dir.path()).unwrap();
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
