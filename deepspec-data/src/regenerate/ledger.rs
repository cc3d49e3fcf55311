//! Which rows are answered and which failed, on disk. Nothing else is remembered between runs.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use deepspec_core::atomic::{self, FileError};
use deepspec_core::jsonl::{self, Appender, Line};
use deepspec_core::{row, usage};
use fs4::fs_std::FileExt;
use serde_json::{Map, Value};

use super::rows::{Row, Survey};
use super::settings::Settings;
use crate::rejects::beside;

/// The outputs of a run: an id stands in at most one of the two files, at most once.
pub struct Ledger {
    output: PathBuf,
    failed_path: PathBuf,
    answered: Appender,
    /// Opened with the first failure.
    failures: Option<Appender>,
    ok: HashSet<String>,
    failed: HashSet<String>,
    /// Holds the lock that keeps a second run off the output; the system frees it however we end.
    _lock: File,
}

impl Ledger {
    /// Opens the outputs, drops torn last lines and finds out what is done.
    ///
    /// # Errors
    /// Usage errors if the output belongs to other inputs or settings; an error if another run is writing it.
    pub fn open(
        output: &Path,
        settings: &Settings,
        survey: &Survey,
        overwrite: bool,
    ) -> anyhow::Result<Self> {
        if let Some(parent) = output.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            atomic::create_dir(parent)?;
        }
        let lock = lock(output)?;
        let (failed_path, record) = (failed_path(output), beside(output, ".run.json"));
        if overwrite {
            for path in [&failed_path, &record] {
                remove(path)?;
            }
            lock.set_len(0).map_err(FileError::at("emptying", output))?;
        }
        let answered = Appender::open(output)?;
        let failures = if failed_path.exists() { Some(Appender::open(&failed_path)?) } else { None };
        let ok = ids(output, survey)?;
        let failed = if failures.is_some() { ids(&failed_path, survey)? } else { HashSet::new() };
        if let Some(id) = ok.intersection(&failed).next() {
            bail!(
                "id `{id}` stands in both {} and {}; remove one of the rows",
                output.display(),
                failed_path.display()
            );
        }
        if !(ok.is_empty() && failed.is_empty()) {
            check_settings(output, &record, settings)?;
        }
        atomic::write_json(&record, &settings.record())?;
        Ok(Self { output: output.into(), failed_path, answered, failures, ok, failed, _lock: lock })
    }

    /// Makes the failed rows pending again.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn forget_failed(&mut self) -> Result<(), FileError> {
        self.failures = None;
        remove(&self.failed_path)?;
        self.failed.clear();
        Ok(())
    }

    /// Records an answered row.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn record_ok(&mut self, id: &str, fields: &Map<String, Value>) -> Result<(), FileError> {
        self.answered.append(fields)?;
        self.ok.insert(id.into());
        Ok(())
    }

    /// Records a row that could not be answered.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn record_failed(&mut self, row: Row, problem: &str) -> Result<(), FileError> {
        let failures = match &mut self.failures {
            Some(failures) => failures,
            none => none.insert(Appender::open(&self.failed_path)?),
        };
        let id = row.id.clone();
        failures.append(&row.failed(problem))?;
        self.failed.insert(id);
        Ok(())
    }

    /// Waits until all rows are on disk.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn sync(&mut self) -> Result<(), FileError> {
        self.answered.sync()?;
        self.failures.as_mut().map_or(Ok(()), Appender::sync)
    }

    /// Ids that have neither been answered nor failed.
    pub fn pending_ids(&self, survey: &Survey) -> HashSet<String> {
        survey.ids.iter().filter(|&id| !self.ok.contains(id) && !self.failed.contains(id)).cloned().collect()
    }

    /// How many ids have neither been answered nor failed.
    pub fn pending(&self, survey: &Survey) -> usize {
        survey.ids.len() - self.ok() - self.failed()
    }

    /// How many rows are answered.
    pub fn ok(&self) -> usize {
        self.ok.len()
    }

    /// How many rows failed.
    pub fn failed(&self) -> usize {
        self.failed.len()
    }

    /// Where answered rows are.
    pub fn output(&self) -> &Path {
        &self.output
    }

    /// Where failed rows are.
    pub fn failed_path(&self) -> &Path {
        &self.failed_path
    }
}

/// `answers.jsonl` to `answers_error.jsonl`.
fn failed_path(output: &Path) -> PathBuf {
    let stem = output.file_stem().unwrap_or_default().to_string_lossy();
    output.with_file_name(format!("{stem}_error.jsonl"))
}

fn lock(output: &Path) -> anyhow::Result<File> {
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .open(output)
        .map_err(FileError::at("opening", output))?;
    if !file.try_lock_exclusive().with_context(|| format!("locking {}", output.display()))? {
        bail!("{} is being written by another run", output.display());
    }
    Ok(file)
}

fn remove(path: &Path) -> Result<(), FileError> {
    if path.exists() { fs::remove_file(path).map_err(FileError::at("removing", path)) } else { Ok(()) }
}

/// The ids in an output, all of which must be the inputs'.
fn ids(path: &Path, survey: &Survey) -> anyhow::Result<HashSet<String>> {
    let mut ids = HashSet::new();
    for line in jsonl::Reader::open(path)? {
        let (line, id) = match line? {
            Line::Bad(bad) => bail!("{bad}; repair the line, or --overwrite to start anew"),
            Line::Row(line, fields) => (line, row::id_of(&fields)),
        };
        let place = format!("{}:{line}", path.display());
        match id {
            Err(problem) => bail!("{place}: {problem}; repair the line, or --overwrite to start anew"),
            Ok(id) if !survey.ids.contains(&id) => {
                usage!(
                    "{place}: id `{id}` is in none of the inputs; give another --output, or --overwrite to start anew"
                )
            }
            Ok(id) if ids.contains(&id) => {
                bail!("{place}: id `{id}` stands here twice; remove one of the rows")
            }
            Ok(id) => ids.insert(id),
        };
    }
    Ok(ids)
}

/// Rows that are there must have been made with the same settings.
fn check_settings(output: &Path, record: &Path, settings: &Settings) -> anyhow::Result<()> {
    if !record.exists() {
        usage!(
            "{} has rows but {} is missing, so their settings are unknown; give another --output, or --overwrite to start anew",
            output.display(),
            record.display()
        );
    }
    let text = atomic::read_text(record)?;
    let earlier =
        serde_json::from_str(&text).with_context(|| format!("{}: not valid JSON", record.display()))?;
    let differing = settings.differences(&earlier);
    if !differing.is_empty() {
        usage!(
            "{} was made with other settings ({}); use the same, another --output, or --overwrite to start anew",
            output.display(),
            differing.join(", ")
        );
    }
    Ok(())
}
