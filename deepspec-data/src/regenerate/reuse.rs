//! Reuses answers of an earlier run of the same model if the prompts are equal.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use deepspec_core::atomic::FileError;
use deepspec_core::{atomic, digest, row, usage};
use serde_json::{Map, Value};

use super::index;
use super::rows::Row;
use super::settings::{RequestSettings, WORKER};
use super::store::ResultStore;
use crate::rejected_rows::with_appended_suffix;

/// Settings that may differ between the runs, because inputs and worker do not change an answer.
const IGNORED_SETTINGS: [&str; 2] = ["inputs", WORKER];

/// Checks that earlier outputs have these settings.
///
/// # Errors
/// With a usage error that names differing settings, or a missing file.
pub fn check(earlier: &[PathBuf], settings: &RequestSettings) -> anyhow::Result<()> {
    for path in earlier {
        let record = with_appended_suffix(path, ".run.json");
        if !path.is_file() || !record.is_file() {
            let missing = if path.is_file() { &record } else { path };
            usage!("--reuse {}: {} does not exist", path.display(), missing.display());
        }
        let record: Value = serde_json::from_str(&atomic::read_text(&record)?)
            .with_context(|| format!("{}: not valid JSON", record.display()))?;
        let mut differing = settings.differing_settings(&record);
        differing.retain(|name| !IGNORED_SETTINGS.contains(&name.as_str()));
        if !differing.is_empty() {
            usage!(
                "--reuse {}: its answers were made with other settings ({})",
                path.display(),
                differing.join(", ")
            );
        }
    }
    Ok(())
}

/// Positions of the answered rows of earlier outputs by id, in 40 bytes per row.
pub struct EarlierAnswers {
    files: Vec<(PathBuf, BufReader<File>)>,
    /// File and byte offset of each row.
    places: HashMap<u128, (usize, u64)>,
}

impl EarlierAnswers {
    /// Reads earlier outputs. If an id occurs several times, the last row counts.
    pub fn read(earlier: &[PathBuf]) -> Result<Self, FileError> {
        let (mut files, mut places) = (vec![], HashMap::new());
        for (number, path) in earlier.iter().enumerate() {
            let file = File::open(path).map_err(FileError::at("reading", path))?;
            let mut reader = BufReader::new(file);
            let mut at = 0;
            while let Some((row, length)) = read_row(&mut reader).map_err(FileError::at("reading", path))? {
                let answered =
                    |row: &Map<String, Value>| row.get("status").is_some_and(|status| status == "success");
                if let Some(id) = row.filter(answered).and_then(|row| row::required_id(&row).ok()) {
                    places.insert(digest::fingerprint(id.as_bytes()), (number, at));
                }
                at += length;
            }
            files.push((path.clone(), reader));
        }
        Ok(Self { files, places })
    }

    /// Calls `take` with every row that has an earlier answer, and its answers; returns the number
    /// of such rows.
    pub fn take(
        &mut self,
        inputs: &[PathBuf],
        settings: &RequestSettings,
        lacks: impl Fn(&str) -> bool,
        mut take: impl FnMut(&str, Map<String, Value>) -> anyhow::Result<()>,
    ) -> anyhow::Result<usize> {
        let mut taken = 0;
        for row in index::select_rows(inputs, settings, lacks) {
            let row = row?;
            if let Some(fields) = self.find_answers(&row, settings)? {
                take(&row.id, fields)?;
                taken += 1;
            }
        }
        Ok(taken)
    }

    fn find_answers(
        &mut self,
        row: &Row,
        settings: &RequestSettings,
    ) -> Result<Option<Map<String, Value>>, FileError> {
        let Some(&(file, at)) = self.places.get(&digest::fingerprint(row.id.as_bytes())) else {
            return Ok(None);
        };
        let (path, reader) = &mut self.files[file];
        let found = reader.seek(SeekFrom::Start(at)).and_then(|_| read_row(reader));
        let Some((Some(earlier), _)) = found.map_err(FileError::at("reading", path))? else {
            return Ok(None);
        };
        let same = Row::parse(earlier.clone(), settings).is_ok_and(|asked| asked.prompt() == row.prompt());
        Ok(same.then(|| row.with_answers(&earlier)))
    }
}

/// A line's row, None if malformed, and its length in bytes.
type RowAndLength = (Option<Map<String, Value>>, u64);

/// The next line; None at the end of the file.
fn read_row(reader: &mut BufReader<File>) -> io::Result<Option<RowAndLength>> {
    let mut line = vec![];
    let length = reader.read_until(b'\n', &mut line)?;
    Ok((length > 0).then(|| (serde_json::from_slice(&line).ok(), length as u64)))
}

/// Reuses the answers of earlier outputs; returns the number of rows.
pub fn reuse_answers(
    earlier: &[PathBuf],
    inputs: &[PathBuf],
    settings: &RequestSettings,
    store: &mut ResultStore,
) -> anyhow::Result<usize> {
    let (done, index) = (store.done().clone(), Arc::clone(&store.index));
    EarlierAnswers::read(earlier)?.take(
        inputs,
        settings,
        |id| index.ids.contains(id) && done.is_pending(id),
        |id, fields| Ok(store.record_ok(id, &fields)?),
    )
}
