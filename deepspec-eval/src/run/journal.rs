//! Journal of an evaluation: one line per answer, kept in the output folder until the results are
//! written.
//!
//! An interrupted evaluation continues with the same command. Worker processes (`--worker`) leave
//! their answers in journals for the process that gathers them. Answers do not depend on the other
//! requests of a batch, so that interruptions and workers do not change them.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};
use deepspec_core::jsonl::Appender;
use deepspec_core::usage;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::args::Worker;
use super::entry::{AnswerKey, JournalEntry};
use super::journal_check::ExpectedAnswer;

const JOURNAL_FORMAT: &str = "deepspec-eval-journal 3";

/// First line of a journal.
#[derive(Serialize, Deserialize)]
struct Header {
    format: String,
    run: Map<String, Value>,
}

/// The journals of an output folder, including this process's own.
pub struct Journal {
    own: Appender,
    /// The first line of the own journal, until it is written.
    header: Option<Header>,
    /// Locks that keep other processes from writing to the files.
    _locks: Vec<File>,
    files: Vec<PathBuf>,
    earlier: EarlierAnswers,
}

/// Answers of earlier runs, each with its file and line.
type EarlierAnswers = HashMap<AnswerKey, (JournalEntry, PathBuf, usize)>;

impl Journal {
    /// Opens the journal of this process, and the journals of earlier or other processes in `dir`.
    /// `run` has everything that the answers depend on. Journals of another run are refused, or
    /// dropped with `overwrite`.
    ///
    /// # Errors
    /// Usage errors: a journal of another run, or one that another process writes. Also fails on
    /// I/O errors, with the path.
    pub fn open(
        dir: &Path,
        worker: Option<Worker>,
        run: &Map<String, Value>,
        overwrite: bool,
    ) -> anyhow::Result<Self> {
        let own = dir.join(worker.map_or("journal.jsonl".into(), |worker| {
            format!("journal-{}-of-{}.jsonl", worker.index + 1, worker.count)
        }));
        // A worker reads only its own journal; the gathering process reads all.
        let mut files = if worker.is_some() { vec![] } else { journal_files(dir)? };
        if overwrite {
            remove_files(&files)?;
            files.clear();
        }
        files.retain(|file| *file != own);
        files.push(own.clone());
        let locks = files.iter().map(|file| lock_file(file)).collect::<anyhow::Result<Vec<_>>>()?;
        let appender = Appender::open(&own)?;
        let (mut earlier, mut begun) = (HashMap::new(), false);
        for file in &files {
            begun = read_journal(file, run, &mut earlier)?; // this process's own journal is the last
        }
        // The header is written with the first answer, so that a run that fails earlier leaves no
        // journal.
        let header = (!begun).then(|| Header { format: JOURNAL_FORMAT.into(), run: run.clone() });
        if !earlier.is_empty() {
            tracing::info!("{} answers are there already", earlier.len());
        }
        Ok(Self { own: appender, header, _locks: locks, files, earlier })
    }

    /// The journal's answer, if there is one that passes the check. An answer that fails the check
    /// is dropped with a warning that names file and line.
    pub fn take_answer(&mut self, key: &AnswerKey, asked: &ExpectedAnswer) -> Option<JournalEntry> {
        self.take_checked(key, |entry| asked.check(entry))
    }

    /// As [`Journal::take_answer`], with another check.
    pub fn take_checked(
        &mut self,
        key: &AnswerKey,
        check: impl FnOnce(&JournalEntry) -> Result<(), String>,
    ) -> Option<JournalEntry> {
        let (entry, file, line) = self.earlier.remove(key)?;
        match check(&entry) {
            Ok(()) => Some(entry),
            Err(problem) => {
                tracing::warn!("{}:{line}: no answer, for {problem}; it is decoded again", file.display());
                None
            }
        }
    }

    /// Appends an answer to the journal.
    ///
    /// # Errors
    /// Fails on I/O errors, with the path.
    pub fn append_answer(&mut self, entry: &JournalEntry) -> anyhow::Result<()> {
        if let Some(header) = self.header.take() {
            self.own.append(&header)?;
        }
        Ok(self.own.append(entry)?)
    }

    /// Removes the journals after the results are written.
    ///
    /// # Errors
    /// Fails on I/O errors, with the path.
    pub fn remove(self) -> anyhow::Result<()> {
        remove_files(&self.files)
    }
}

fn journal_files(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = vec![];
    for entry in fs::read_dir(dir).map_err(FileError::at("reading", dir))? {
        let name = entry.map_err(FileError::at("reading", dir))?.file_name();
        if name.to_str().is_some_and(|name| name.starts_with("journal") && name.ends_with(".jsonl")) {
            files.push(dir.join(name));
        }
    }
    files.sort();
    Ok(files)
}

fn lock_file(file: &Path) -> anyhow::Result<File> {
    let open = File::options().append(true).create(true).open(file);
    let handle = open.map_err(FileError::at("opening", file))?;
    if !atomic::try_lock(&handle, file)? {
        usage!("{} is being written by another process; wait for it, or end it", file.display());
    }
    Ok(handle)
}

fn remove_files(files: &[PathBuf]) -> anyhow::Result<()> {
    for file in files {
        fs::remove_file(file).map_err(FileError::at("removing", file))?;
    }
    Ok(())
}

/// Adds the answers of a journal to `earlier`, and returns whether it has a header. Truncated or
/// damaged lines are skipped.
fn read_journal(file: &Path, run: &Map<String, Value>, earlier: &mut EarlierAnswers) -> anyhow::Result<bool> {
    let opened = File::open(file).map_err(FileError::at("opening", file))?;
    let mut lines = BufReader::new(opened).split(b'\n');
    let mut next = || lines.next().transpose().map_err(FileError::at("reading", file));
    let Some(first) = next()? else { return Ok(false) };
    let header = match serde_json::from_slice::<Header>(&first) {
        Ok(header) if header.format == JOURNAL_FORMAT => header,
        _ => usage!("{}: not a journal that this version writes; remove it", file.display()),
    };
    let names: Vec<&String> = run.keys().chain(header.run.keys()).collect();
    if let Some(name) = names.into_iter().find(|name| run.get(*name) != header.run.get(*name)) {
        let of = |run: &Map<String, Value>| run.get(name).map_or("nothing".into(), Value::to_string);
        usage!(
            "{} is of another evaluation, which was not finished: its {name} is {}, now it is {}; --overwrite drops it",
            file.display(),
            of(&header.run),
            of(run)
        );
    }
    let (mut damaged, mut number) = (0, 1);
    while let Some(line) = next()? {
        number += 1;
        match serde_json::from_slice::<JournalEntry>(&line) {
            Ok(entry) => drop(earlier.insert(entry.key.clone(), (entry, file.to_path_buf(), number))),
            Err(_) => damaged += 1,
        }
    }
    if damaged > 0 {
        tracing::warn!("{}: {damaged} lines are no answers; they are decoded again", file.display());
    }
    Ok(true)
}
