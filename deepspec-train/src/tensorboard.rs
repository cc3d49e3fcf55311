//! Writes metrics and the recipe to a TensorBoard event file.
//!
//! The file is built from metrics.jsonl. Every start writes it again from the lines that are still
//! valid, so no step appears twice.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use deepspec_core::atomic::{self, FileError};
use serde_json::{Map, Value};

use crate::events::{
    self, Event, EventContent, Metadata, Plugin, SessionLog, Shape, Summary, Tensor, Value as Point,
    ValueContent,
};

/// Prefix of event file names.
pub const EVENT_FILE_PREFIX: &str = "events.out.tfevents.";
/// Keys of a line that are not metrics: the step, and the time in seconds since 1970.
const NON_METRIC_KEYS: [&str; 2] = ["step", "time"];

/// An event file that new metrics are appended to.
pub struct TensorBoard {
    writer: BufWriter<File>,
    path: PathBuf,
}

impl TensorBoard {
    /// Writes the recipe and `rows` of metrics to a new file in `dir`, which replaces all event
    /// files there.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn open<'r>(
        dir: &Path,
        recipe: &str,
        rows: impl Iterator<Item = &'r Map<String, Value>>,
    ) -> Result<Self, FileError> {
        let old = event_files(dir)?;
        let path = dir.join(format!("{EVENT_FILE_PREFIX}{}.{}", unix_time().as_nanos(), std::process::id()));
        let partial = atomic::partial_path(&path);
        let file = File::create(&partial).map_err(FileError::at("writing", &partial))?;
        let mut this = Self { writer: BufWriter::new(file), path };
        this.write_header(recipe)?;
        for row in rows {
            this.write_row(row)?;
        }
        this.flush()?;
        fs::rename(&partial, &this.path).map_err(FileError::at("writing", &this.path))?;
        for path in old {
            fs::remove_file(&path).map_err(FileError::at("removing", &path))?;
        }
        Ok(this)
    }

    /// Appends the metrics of a line.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn append_row(&mut self, row: &Map<String, Value>) -> Result<(), FileError> {
        self.write_row(row)?;
        self.flush()
    }

    fn write_header(&mut self, recipe: &str) -> Result<(), FileError> {
        let now = unix_time().as_secs_f64();
        self.write_event(now, 0, EventContent::FileVersion("brain.Event:2".into()))?;
        // Tells a running TensorBoard to discard the events of the previous file.
        self.write_event(now, 0, EventContent::SessionLog(SessionLog::START))?;
        // Four spaces make it a Markdown code block.
        let text = recipe.lines().map(|line| format!("    {line}\n")).collect::<String>();
        let text = Tensor { dtype: Tensor::DT_STRING, shape: Some(Shape {}), texts: vec![text.into()] };
        let value = Point {
            tag: "recipe".into(),
            metadata: Some(Metadata { plugin: Some(Plugin { name: "text".into() }) }),
            shown: Some(ValueContent::Tensor(text)),
        };
        self.write_event(now, 0, EventContent::Summary(Summary { value: vec![value] }))
    }

    fn write_row(&mut self, row: &Map<String, Value>) -> Result<(), FileError> {
        let time = row.get("time").and_then(Value::as_f64).unwrap_or_default();
        let step = row.get("step").and_then(Value::as_i64).unwrap_or_default();
        let value = scalars(row)
            .into_iter()
            .map(|(tag, number)| Point {
                tag,
                metadata: None,
                shown: Some(ValueContent::Number(number as f32)),
            })
            .collect();
        self.write_event(time, step, EventContent::Summary(Summary { value }))
    }

    fn write_event(&mut self, wall_time: f64, step: i64, what: EventContent) -> Result<(), FileError> {
        let event = Event { wall_time, step, what: Some(what) };
        events::write_record(&mut self.writer, &event).map_err(FileError::at("writing", &self.path))
    }

    fn flush(&mut self) -> Result<(), FileError> {
        self.writer.flush().map_err(FileError::at("writing", &self.path))
    }
}

/// Seconds since 1970.
pub fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The metrics of a line by tag, such as `train/loss` and `train/accept_rate/0`. The metrics in an
/// object get the object's name as prefix, such as `eval/tau`.
fn scalars(row: &Map<String, Value>) -> Vec<(String, f64)> {
    let mut found = vec![];
    for (key, value) in row.iter().filter(|(key, _)| !NON_METRIC_KEYS.contains(&key.as_str())) {
        let tag = if value.is_object() { key.clone() } else { format!("train/{key}") };
        collect_scalars(tag, value, &mut found);
    }
    found
}

fn collect_scalars(tag: String, value: &Value, found: &mut Vec<(String, f64)>) {
    match value {
        Value::Number(number) => found.extend(number.as_f64().map(|number| (tag, number))),
        Value::Array(values) => {
            values
                .iter()
                .enumerate()
                .for_each(|(k, value)| collect_scalars(format!("{tag}/{k}"), value, found));
        }
        Value::Object(map) => {
            map.iter().for_each(|(key, value)| collect_scalars(format!("{tag}/{key}"), value, found));
        }
        _ => {}
    }
}

fn event_files(dir: &Path) -> Result<Vec<PathBuf>, FileError> {
    let entries = fs::read_dir(dir).map_err(FileError::at("reading", dir))?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path()).map_err(FileError::at("reading", dir)));
    let is_ours = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(EVENT_FILE_PREFIX))
            && path.is_file()
    };
    paths.filter(|path| path.as_ref().map_or(true, is_ours)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_get_tags_by_where_they_stand() {
        let row = json!({"step": 3, "time": 5.0, "loss": 1.5, "accept_rate": [0.5, null], "note": "x",
            "eval": {"tau": 2.0, "suites": {"smoke-math": 3}}});
        let found = scalars(row.as_object().unwrap());
        let expected = [
            ("train/loss", 1.5),
            ("train/accept_rate/0", 0.5),
            ("eval/tau", 2.0),
            ("eval/suites/smoke-math", 3.0),
        ];
        assert_eq!(found, expected.map(|(tag, number)| (tag.to_string(), number)));
    }
}
