//! Reads this project's JSON files with a check of format and version, and errors that name the
//! key.

use std::path::Path;

use deepspec_core::{atomic, usage};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Reads a JSON file of the given format and version. If the file has another format, the error
/// consists of the file's name and `foreign`.
///
/// # Errors
/// Usage errors that name the file and the invalid key; also fails if the file cannot be read.
pub fn read<T: DeserializeOwned>(
    file: &Path,
    (format, version): (&str, u64),
    foreign: &str,
) -> anyhow::Result<T> {
    let json: Value = match serde_json::from_str(&atomic::read_text(file)?) {
        Ok(json) => json,
        Err(error) => usage!("{}: not valid JSON: {error}", file.display()),
    };
    if json["format"] != format || json["format_version"] != version {
        usage!("{}: {foreign}; expected {format} {version}", file.display());
    }
    match serde_path_to_error::deserialize(json) {
        Ok(read) => Ok(read),
        Err(error) => match error.path().to_string().as_str() {
            "." => usage!("{}: {}", file.display(), error.inner()),
            key => usage!("{}: `{key}`: {}", file.display(), error.inner()),
        },
    }
}
