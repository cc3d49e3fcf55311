//! `suites --list`: the suites and the state of their files.

use std::io::Write;
use std::path::Path;

use crate::suites::builtin::BUILTIN_SUITES;
use crate::suites::record::{Origin, Record};
use crate::suites::suite::{Domain, Suite, SuiteClass};
use deepspec_core::cli;
use deepspec_core::digest::{self, short_digest};
use deepspec_core::jsonl::RawLines;
use serde::Serialize;

use crate::suites::description::public_suites;
use crate::suites::store::describe_origin;

/// A row of the list.
#[derive(Serialize)]
struct SuiteListing {
    name: String,
    domain: Domain,
    /// Number of rows in the existing file.
    rows: Option<usize>,
    cap: Option<usize>,
    /// Origin of the rows, from the record or from the suite's description.
    source: String,
    state: FileState,
    /// SHA-256 of the existing file.
    sha256: Option<String>,
}

/// State of a suite's file compared with the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum FileState {
    Absent,
    /// The file is as recorded. Smoke suites need no record.
    Present,
    /// The file exists but was not written by this command.
    Unrecorded,
    ChangedSinceRecorded,
}

impl FileState {
    fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Present => "present",
            Self::Unrecorded => "unrecorded",
            Self::ChangedSinceRecorded => "changed since recorded",
        }
    }
}

/// Prints the suites of a folder as a table or as JSON.
///
/// # Errors
/// Fails if the record or a suite cannot be read.
pub fn list(dir: &Path, json: bool) -> anyhow::Result<()> {
    let record = Record::read(dir)?;
    let suites = BUILTIN_SUITES.iter().cloned().chain(record.user_suites());
    let listed: Vec<SuiteListing> =
        suites.map(|suite| inspect_suite(suite, dir, &record)).collect::<anyhow::Result<_>>()?;
    let text = if json { serde_json::to_string_pretty(&listed)? + "\n" } else { format_table(&listed) };
    Ok(cli::stdout().write_all(text.as_bytes())?)
}

fn inspect_suite(suite: Suite, dir: &Path, record: &Record) -> anyhow::Result<SuiteListing> {
    let (path, entry) = (suite.path(dir), record.suites.get(&suite.name));
    let there = path.is_file();
    let sha256 = if there { Some(digest::sha256_of_file(&path)?) } else { None };
    let state = match (&sha256, entry) {
        (None, _) => FileState::Absent,
        (Some(_), None) if suite.class == SuiteClass::Smoke => FileState::Present,
        (Some(_), None) => FileState::Unrecorded,
        (Some(found), Some(entry)) if *found == entry.sha256 => FileState::Present,
        (Some(_), Some(_)) => FileState::ChangedSinceRecorded,
    };
    let mut rows = None;
    if there {
        rows = Some(RawLines::open(&path)?.try_fold(0, |count, line| line.map(|_| count + 1))?);
    }
    let source = match (
        entry.map(|entry| &entry.source),
        public_suites().iter().find(|public| public.name == suite.name),
    ) {
        (Some(Origin::Files(files)), _) if files.len() > 1 => {
            format!("{} and {} more", files[0].path.display(), files.len() - 1)
        }
        (Some(origin), _) => describe_origin(origin),
        (None, Some(public)) => public.dataset.clone(),
        (None, None) => "DeepSpec's own".into(),
    };
    Ok(SuiteListing { cap: suite.cap(), name: suite.name, domain: suite.domain, rows, source, state, sha256 })
}

fn format_table(listed: &[SuiteListing]) -> String {
    let number = |number: Option<usize>| number.map_or_else(|| "–".into(), |number| number.to_string());
    let cells = |one: &SuiteListing| -> [String; 7] {
        [
            one.name.clone(),
            one.domain.name().into(),
            number(one.rows),
            number(one.cap),
            one.source.clone(),
            one.state.name().into(),
            one.sha256.as_deref().map_or("–", short_digest).into(),
        ]
    };
    let header = ["suite", "domain", "rows", "scored", "source", "state", "sha256"].map(String::from);
    let rows: Vec<[String; 7]> = std::iter::once(header).chain(listed.iter().map(cells)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..7).map(width).collect();
    let line = |row: &[String; 7]| {
        let padded = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
            // Numbers are right-aligned.
            if matches!(column, 2 | 3) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_string() + "\n"
    };
    rows.iter().map(line).collect()
}
