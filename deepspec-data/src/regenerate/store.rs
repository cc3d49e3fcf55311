//! Answered and failed rows on disk, the only state between runs.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use deepspec_core::atomic::{self, FileError};
use deepspec_core::jsonl::{Appender, Line, RawLines};
use deepspec_core::{row, usage};
use deepspec_text::{FINISH_REASON, FinishReason};
use serde_json::{Map, Value};

use super::ids::IdSet;
use super::index::InputIndex;
use super::rows::Row;
use super::settings::RequestSettings;
use crate::rejected_rows::{self, with_appended_suffix};

/// Rows that were answered or failed.
#[derive(Debug, Default, Clone)]
pub struct FinishedRows {
    /// Answered rows.
    pub ok: IdSet,
    /// Failed rows.
    pub failed: IdSet,
    /// Number of answered rows by finish reason.
    pub finished: BTreeMap<&'static str, usize>,
    /// Number of failed rows with a broken-off answer, by finish reason.
    pub broken_off: BTreeMap<&'static str, usize>,
}

impl FinishedRows {
    /// Reads the outputs without changing them, ignoring an incomplete last line.
    ///
    /// # Errors
    /// With a usage error if the output belongs to other inputs or settings.
    pub fn read(output: &Path, settings: &RequestSettings, index: &InputIndex) -> anyhow::Result<Self> {
        let (failed_path, mut done, mut both) = (failed_path(output), Self::default(), None);
        if output.exists() {
            let mut ok = IdSet::default();
            read_rows(output, index, &mut ok, |_, row| done.count(row))?;
            done.ok = ok;
        }
        if failed_path.exists() {
            let mut failed = IdSet::default();
            read_rows(&failed_path, index, &mut failed, |id, row| {
                if done.ok.contains(id) {
                    both = Some(id.to_string());
                }
                done.count_failed(row);
            })?;
            done.failed = failed;
        }
        if let Some(id) = both {
            let (output, failed) = (output.display(), failed_path.display());
            bail!("id `{id}` stands in both {output} and {failed}; remove one of the rows");
        }
        if done.ok.len() + done.failed.len() > 0 {
            check_settings(output, &with_appended_suffix(output, ".run.json"), settings)?;
        }
        Ok(done)
    }

    /// Counts the finish reason of an answered row. Older versions did not record it.
    fn count(&mut self, row: &Map<String, Value>) {
        let reason = FinishReason::from_field(row.get(FINISH_REASON)).unwrap_or_default();
        *self.finished.entry(reason.name()).or_default() += 1;
    }

    /// Counts a failed row whose answer was broken off.
    fn count_failed(&mut self, row: &Map<String, Value>) {
        if let Some(reason) = FinishReason::from_field(row.get(FINISH_REASON)) {
            *self.broken_off.entry(reason.name()).or_default() += 1;
        }
    }

    /// Answered rows with a cut answer.
    pub fn truncated_count(&self) -> usize {
        let cut = self.finished.iter().filter(|(word, _)| !FinishReason::parse(word).is_whole());
        cut.map(|(_, rows)| rows).sum()
    }

    /// Whether a row is neither answered nor failed.
    pub fn is_pending(&self, id: &str) -> bool {
        !self.ok.contains(id) && !self.failed.contains(id)
    }
}

/// The outputs of a run. An id occurs at most once, in one of the two files.
pub struct ResultStore {
    /// Ids and malformed lines of the inputs.
    pub index: Arc<InputIndex>,
    output: PathBuf,
    failed_path: PathBuf,
    answered: Appender,
    /// Opened at the first failure.
    failures: Option<Appender>,
    done: FinishedRows,
    /// The lock against a second run on this output. The system releases it even after a crash.
    _lock: File,
}

impl ResultStore {
    /// Opens the outputs, drops incomplete last lines and reads the finished rows.
    ///
    /// # Errors
    /// With a usage error if the output belongs to other inputs or settings. Also fails if another
    /// run is writing it.
    pub fn open(
        output: &Path,
        settings: &RequestSettings,
        index: Arc<InputIndex>,
        overwrite: bool,
    ) -> anyhow::Result<Self> {
        if let Some(parent) = output.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            atomic::create_dir(parent)?;
        }
        let lock = lock_output(output)?;
        let failed_path = failed_path(output);
        if overwrite {
            for path in output_files(output).into_iter().skip(1) {
                remove_if_exists(&path)?;
            }
            lock.set_len(0).map_err(FileError::at("emptying", output))?;
        }
        let answered = Appender::open(output)?;
        let failures = if failed_path.exists() { Some(Appender::open(&failed_path)?) } else { None };
        let done = FinishedRows::read(output, settings, &index)?;
        atomic::write_json(&with_appended_suffix(output, ".run.json"), &settings.record())?;
        Ok(Self { index, output: output.into(), failed_path, answered, failures, done, _lock: lock })
    }

    /// Rows that were answered or failed.
    pub fn done(&self) -> &FinishedRows {
        &self.done
    }

    /// Makes the failed rows pending again.
    pub fn forget_failed(&mut self) -> Result<(), FileError> {
        self.failures = None;
        remove_if_exists(&self.failed_path)?;
        self.done.failed.clear();
        self.done.broken_off.clear();
        Ok(())
    }

    /// Records an answered row.
    pub fn record_ok(&mut self, id: &str, fields: &Map<String, Value>) -> Result<(), FileError> {
        self.answered.append(fields)?;
        self.done.ok.insert(id);
        self.done.count(fields);
        Ok(())
    }

    /// Records a failed row.
    pub fn record_failed(
        &mut self,
        row: Row,
        problem: &str,
        finish: Option<FinishReason>,
    ) -> Result<(), FileError> {
        let failures = match &mut self.failures {
            Some(failures) => failures,
            none => none.insert(Appender::open(&self.failed_path)?),
        };
        let id = row.id.clone();
        let row = row.into_failed_row(problem, finish);
        failures.append(&row)?;
        self.done.count_failed(&row);
        self.done.failed.insert(&id);
        Ok(())
    }

    /// Waits until all rows are on disk.
    pub fn sync(&mut self) -> Result<(), FileError> {
        self.answered.sync()?;
        self.failures.as_mut().map_or(Ok(()), Appender::sync)
    }

    /// Number of ids that were neither answered nor failed.
    pub fn pending(&self) -> usize {
        self.index.ids.len().saturating_sub(self.done.ok.len() + self.done.failed.len())
    }

    /// Path of the answered rows.
    pub fn output(&self) -> &Path {
        &self.output
    }

    /// Path of the failed rows.
    pub fn failed_path(&self) -> &Path {
        &self.failed_path
    }
}

/// All files that a run with this output writes, the output first.
pub fn output_files(output: &Path) -> [PathBuf; 5] {
    let record = with_appended_suffix(output, ".run.json");
    [output.into(), failed_path(output), record, report_path(output), rejected_rows::rejects_path(output)]
}

/// The report's path, such as `answers.jsonl.report.json` for `answers.jsonl`.
pub fn report_path(output: &Path) -> PathBuf {
    with_appended_suffix(output, ".report.json")
}

/// The path of failed rows, such as `answers_error.jsonl` for `answers.jsonl`.
fn failed_path(output: &Path) -> PathBuf {
    let stem = output.file_stem().unwrap_or_default().to_string_lossy();
    output.with_file_name(format!("{stem}_error.jsonl"))
}

fn lock_output(output: &Path) -> anyhow::Result<File> {
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .open(output)
        .map_err(FileError::at("opening", output))?;
    if !atomic::try_lock(&file, output)? {
        bail!("{} is being written by another run", output.display());
    }
    Ok(file)
}

fn remove_if_exists(path: &Path) -> Result<(), FileError> {
    if path.exists() { fs::remove_file(path).map_err(FileError::at("removing", path)) } else { Ok(()) }
}

/// Reads an output's ids, which must all be in the inputs.
fn read_rows(
    path: &Path,
    index: &InputIndex,
    ids: &mut IdSet,
    mut each: impl FnMut(&str, &Map<String, Value>),
) -> anyhow::Result<()> {
    for line in RawLines::open(path)? {
        let line = line?;
        // A crash during a write leaves an incomplete line.
        if line.bytes.as_ref().is_some_and(|bytes| !bytes.ends_with(b"\n")) {
            break;
        }
        let (line, row) = match line.parse(path) {
            Line::Bad(bad) => bail!("{bad}; repair the line, or --overwrite to start anew"),
            Line::Row(line, row) => (line, row),
        };
        let place = format!("{}:{line}", path.display());
        match row::required_id(&row) {
            Err(problem) => bail!("{place}: {problem}; repair the line, or --overwrite to start anew"),
            Ok(id) if !index.ids.contains(&id) => {
                usage!(
                    "{place}: id `{id}` is in none of the inputs; give another --output, or --overwrite to start anew"
                )
            }
            Ok(id) if !ids.insert(&id) => {
                bail!("{place}: id `{id}` stands here twice; remove one of the rows")
            }
            Ok(id) => each(&id, &row),
        }
    }
    Ok(())
}

/// Checks that existing rows have the same settings.
fn check_settings(output: &Path, record: &Path, settings: &RequestSettings) -> anyhow::Result<()> {
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
    let differing = settings.differing_settings(&earlier);
    if !differing.is_empty() {
        usage!(
            "{} was made with other settings ({}); use the same, --overwrite to start anew, or another --output (with --reuse {} for the answers of rows and settings that are the same)",
            output.display(),
            differing.join(", "),
            output.display()
        );
    }
    Ok(())
}
