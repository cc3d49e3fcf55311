//! Input lines that are unusable: shown, and recorded beside the output that they are missing from.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};
use serde_json::json;

/// Lines that are shown one by one; all of them are in the file.
const SHOWN: usize = 10;

/// An input line that is unusable.
pub struct Reject {
    /// The input.
    pub file: PathBuf,
    /// 1-based line, or row of a parquet file.
    pub line: usize,
    /// A phrase that says what is wrong.
    pub reason: String,
}

/// Where the unusable lines of `output`'s inputs are recorded.
pub fn path(output: &Path) -> PathBuf {
    beside(output, ".rejected.jsonl")
}

/// `path` with something behind its name.
pub fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Warns of the first rejects and records all of them, or removes an old record when there are none.
///
/// # Errors
/// Any I/O failure, with the path.
pub fn report(rejects: &[Reject], output: &Path) -> Result<(), FileError> {
    let path = path(output);
    if rejects.is_empty() {
        return if path.exists() {
            fs::remove_file(&path).map_err(FileError::at("removing", &path))
        } else {
            Ok(())
        };
    }
    for Reject { file, line, reason } in rejects.iter().take(SHOWN) {
        tracing::warn!("{}:{line}: {reason}", file.display());
    }
    if rejects.len() > SHOWN {
        tracing::warn!("and {} more lines; all are in {}", rejects.len() - SHOWN, path.display());
    }
    atomic::replace(&path, |out| {
        rejects.iter().try_for_each(|Reject { file, line, reason }| {
            serde_json::to_writer(&mut *out, &json!({"file": file, "line": line, "reason": reason}))?;
            out.write_all(b"\n")
        })
    })
}
