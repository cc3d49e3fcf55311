//! Detects JSON files without one row per line.

use std::fs;
use std::io::{BufRead, Read};

use deepspec_core::atomic::FileError;
use deepspec_core::jsonl;
use deepspec_datasets::rows::DataFile;
use deepspec_text::is_record_key;
use serde_json::{Map, Value};

/// Maximum number of bytes of a file that are parsed to find its structure.
const MAX_PARSED_BYTES: u64 = 1 << 30;

/// Refuses a JSON file whose rows span several lines or are nested in an object. The error gives a
/// command that extracts the rows.
///
/// # Errors
/// If the file has that structure, or cannot be read.
pub fn check_one_row_per_line(file: &DataFile) -> anyhow::Result<()> {
    let mut text = jsonl::open_text(file.path())?;
    let mut line = vec![];
    while line.trim_ascii().is_empty() {
        line.clear();
        let read = Read::take(&mut text, MAX_PARSED_BYTES).read_until(b'\n', &mut line);
        if read.map_err(FileError::at("reading", file.path()))? == 0 {
            return Ok(());
        }
    }
    let first = serde_json::from_slice::<Value>(&line).ok();
    let is_alone = first.is_some()
        && text.fill_buf().map_err(FileError::at("reading", file.path()))?.trim_ascii().is_empty();
    let held = match first {
        Some(value) if is_alone => Some(value),
        Some(_) => None,
        None if fs::metadata(file.path()).is_ok_and(|data| data.len() > MAX_PARSED_BYTES) => None,
        None => {
            let text = jsonl::open_text(file.path())?;
            let mut values = serde_json::Deserializer::from_reader(text).into_iter::<Value>();
            values.next().and_then(Result::ok)
        }
    };
    let Some(Value::Object(fields)) = held else { return Ok(()) };
    let path = file.path().display();
    match key_of_rows(&fields) {
        Some(key) => anyhow::bail!(
            "{path} is one JSON object with its rows in `{key}`, expected one object per line; take them out: \
             jq -c '.{key}[]' {path} > rows.jsonl"
        ),
        None if !is_alone => anyhow::bail!(
            "{path} holds JSON objects over several lines, expected one object per line; write them so: \
             jq -c . {path} > rows.jsonl"
        ),
        None => Ok(()),
    }
}

/// The key of the rows in an object that is not itself a row.
fn key_of_rows(fields: &Map<String, Value>) -> Option<&str> {
    if fields.keys().any(|key| is_record_key(key)) {
        return None;
    }
    let holds_rows =
        |value: &Value| value.as_array().is_some_and(|rows| rows.first().is_some_and(Value::is_object));
    fields.iter().find(|(_, value)| holds_rows(value)).map(|(key, _)| key.as_str())
}
