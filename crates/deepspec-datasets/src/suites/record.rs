//! `suites.json`: the content of a suites folder, so that a score identifies the exact suite.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};
use deepspec_core::usage;
use serde::{Deserialize, Serialize};

use crate::suites::suite::{Domain, Suite, SuiteClass, check_name};

/// Name of the file.
pub const RECORD_FILE: &str = "suites.json";
const RECORD_FORMAT: &str = "deepspec-datasets";
const VERSION: u64 = 1;

/// The record of a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Always `deepspec-datasets`.
    pub format: String,
    /// Version of this layout.
    pub format_version: u64,
    /// Tool version of the last write; older records lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_version: Option<String>,
    /// The suites by name.
    pub suites: BTreeMap<String, SuiteRecord>,
}

/// The record of a suite.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SuiteRecord {
    /// Domain of the suite.
    pub domain: Domain,
    /// Rows in the file.
    pub rows: usize,
    /// Maximum number of rows to score; None scores all rows.
    pub cap: Option<usize>,
    /// Origin of the rows.
    pub source: Origin,
    /// SHA-256 of the JSONL file.
    pub sha256: String,
    /// Version of the conversion: a number for the public suites, `description DIGEST` for
    /// described suites.
    pub converter: String,
}

/// Origin of a suite's rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// A dataset on the Hugging Face hub.
    Hub {
        /// `owner/name`.
        dataset: String,
        /// The commit.
        revision: String,
    },
    /// Local files, in order.
    Files(Vec<SourceFile>),
}

/// A source file of rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFile {
    /// Path of the file as the user gave it.
    pub path: PathBuf,
    /// SHA-256 of the file.
    pub sha256: String,
}

impl Default for Record {
    fn default() -> Self {
        let tool_version = Some(deepspec_core::VERSION.into());
        Self { format: RECORD_FORMAT.into(), format_version: VERSION, tool_version, suites: BTreeMap::new() }
    }
}

impl Record {
    /// Reads the record of a folder; a folder without a record has an empty one.
    ///
    /// # Errors
    /// Fails if the file cannot be read. Fails with a usage error if it is no record of this
    /// version.
    pub fn read(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join(RECORD_FILE);
        if !path.exists() {
            return Ok(Self::default());
        }
        let text = atomic::read_text(&path)?;
        let record: Self = match serde_json::from_str(&text) {
            Ok(record) => record,
            Err(error) => usage!(
                "{}: not a record of suites ({error}); move it away and run `deepspec-data suites` again",
                path.display()
            ),
        };
        if record.format != RECORD_FORMAT || record.format_version != VERSION {
            usage!(
                "{}: found {} {}, expected {RECORD_FORMAT} {VERSION}; it was written by another version of `deepspec-data`",
                path.display(),
                record.format,
                record.format_version
            );
        }
        if let Some(problem) = record.suites.keys().find_map(|name| check_name(name).err()) {
            usage!("{}: {problem}", path.display());
        }
        if let Some((name, _)) = record.suites.iter().find(|(_, entry)| entry.cap == Some(0)) {
            usage!("{}: `suites.{name}.cap` is 0; expected at least 1, or null for all rows", path.display());
        }
        Ok(record)
    }

    /// Writes the record of a folder atomically.
    ///
    /// # Errors
    /// Fails on any I/O error, with the path.
    pub fn write(&self, dir: &Path) -> Result<(), FileError> {
        let tool_version = Some(deepspec_core::VERSION.into());
        atomic::write_json(&dir.join(RECORD_FILE), &Self { tool_version, ..self.clone() })
    }

    /// The known or recorded suite `name`. Known suites take precedence, because the caps of
    /// published suites are fixed.
    pub fn suite(&self, name: &str) -> Option<Suite> {
        let described = |entry: &SuiteRecord| Suite {
            name: name.to_string(),
            domain: entry.domain,
            class: SuiteClass::User(entry.cap),
        };
        Suite::find_builtin(name).cloned().or_else(|| self.suites.get(name).map(described))
    }

    /// The recorded suites that are not known suites.
    pub fn user_suites(&self) -> impl Iterator<Item = Suite> {
        let names = self.suites.keys().filter(|name| Suite::find_builtin(name).is_none());
        names.filter_map(|name| self.suite(name))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn entry(source: Origin) -> SuiteRecord {
        let (rows, cap) = (2, Some(1));
        SuiteRecord { domain: Domain::Code, rows, cap, source, sha256: "ab".into(), converter: "1".into() }
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Record::read(dir.path()).unwrap(), Record::default());
        let mut record = Record::default();
        let file = SourceFile { path: "a.jsonl".into(), sha256: "cd".into() };
        record.suites.insert("mine".into(), entry(Origin::Files(vec![file])));
        let hub = Origin::Hub { dataset: "owner/name".into(), revision: "main".into() };
        record.suites.insert("gsm8k".into(), entry(hub));
        record.write(dir.path()).unwrap();
        assert_eq!(Record::read(dir.path()).unwrap(), record);
        let named =
            fs::read_to_string(dir.path().join(RECORD_FILE)).unwrap().contains(deepspec_core::VERSION);
        assert!(named, "the version that wrote it");
        assert_eq!(record.suite("mine").unwrap().cap(), Some(1));
        assert_eq!(record.suite("gsm8k").unwrap(), *Suite::find_builtin("gsm8k").unwrap());
        assert!(record.suite("other").is_none());
        assert_eq!(record.user_suites().map(|suite| suite.name).collect::<Vec<_>>(), ["mine"]);
    }

    #[test]
    fn what_is_no_record_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let says = |text: &str, words: &[&str]| {
            fs::write(dir.path().join(RECORD_FILE), text).unwrap();
            let error = Record::read(dir.path()).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{words:?} not in: {error}");
        };
        says("{", &["suites.json: not a record", "line 1"]);
        says("{\"format\": \"deepspec-datasets\"}", &["missing field `format_version`"]);
        says(
            "{\"format\": \"deepspec-datasets\", \"format_version\": 2, \"suites\": {}}",
            &["found deepspec-datasets 2, expected deepspec-datasets 1"],
        );
        let mut record = Record::default();
        record.suites.insert("../up".into(), entry(Origin::Files(vec![])));
        says(&serde_json::to_string(&record).unwrap(), &["suites.json", "`../up` is no name"]);
        let empty = SuiteRecord { cap: Some(0), ..entry(Origin::Files(vec![])) };
        record.suites = [("mine".into(), empty)].into();
        says(&serde_json::to_string(&record).unwrap(), &["suites.json: `suites.mine.cap` is 0"]);
    }
}
