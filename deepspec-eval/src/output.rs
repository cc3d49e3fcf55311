//! Standard output.

use std::io::{self, Write};
use std::path::Path;

use deepspec_core::{atomic, cli, usage};
use serde::Serialize;
use serde_json::Value;

/// Writes results to standard output; a reader that stops reading (`| head`) has seen enough.
///
/// # Errors
/// If it cannot be written otherwise.
pub fn print(text: &str) -> io::Result<()> {
    let mut stdout = cli::stdout();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// Whether `file` holds `found` already, but for the version of the program that wrote it: whoever asks again has nothing to do.
///
/// # Errors
/// A usage error where the file is there and holds something else; it cannot be read.
pub fn is_there(file: &Path, found: &impl Serialize) -> anyhow::Result<bool> {
    if !file.exists() {
        return Ok(false);
    }
    let mut found = serde_json::to_value(found)?;
    // Numbers as a file gives them.
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

/// Refuses to write `files` into `dir` where some of them are there: results of the same kind, which `own` tells, are replaced with
/// `overwrite`, those of another never.
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
