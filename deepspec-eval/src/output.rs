//! Writes to standard output, and checks output files.

use std::io::{self, Write};
use std::path::Path;

use deepspec_core::{atomic, cli, usage};
use serde::Serialize;
use serde_json::Value;

/// Writes results to standard output. A closed pipe (`| head`) is not an error.
///
/// # Errors
/// Fails if standard output cannot be written for another reason.
pub fn print(text: &str) -> io::Result<()> {
    let mut stdout = cli::stdout();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// Whether `file` already contains `found`, apart from the program version. The command then has
/// nothing to do.
///
/// # Errors
/// A usage error if the file exists and holds something else; also fails if it cannot be read.
pub fn is_already_written(file: &Path, found: &impl Serialize) -> anyhow::Result<bool> {
    if !file.exists() {
        return Ok(false);
    }
    let mut found = serde_json::to_value(found)?;
    // Converts `found` to text and back, so that its numbers are rounded like the numbers in the
    // file.
    found = serde_json::from_str(&found.to_string())?;
    let mut kept: Value = serde_json::from_str(&atomic::read_text(file)?).unwrap_or_default();
    for value in [&mut found, &mut kept] {
        value["tool_version"] = Value::Null;
    }
    if kept != found {
        usage!("{} exists and holds something else; --overwrite replaces it", file.display());
    }
    tracing::info!("{} is complete; nothing to do (--overwrite makes it anew)", file.display());
    Ok(true)
}

/// Refuses to write `files` into `dir` if some of them exist. The file `own` marks a folder with
/// results of the same command. Only such results are replaced, and only with `overwrite`.
///
/// # Errors
/// A usage error that names the file.
pub fn check_fresh(dir: &Path, own: &str, files: &[&str], overwrite: bool) -> anyhow::Result<()> {
    if dir.join(own).exists() {
        if !overwrite {
            usage!("{} exists; --overwrite replaces it", dir.join(own).display());
        }
        return Ok(());
    }
    if let Some(file) = files.iter().map(|name| dir.join(name)).find(|file| file.exists()) {
        usage!(
            "{} exists, but no {own} beside it: it is of something else; name another --output-dir",
            file.display()
        );
    }
    Ok(())
}
