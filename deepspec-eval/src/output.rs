//! Standard output.

use std::io::{self, Write};
use std::path::Path;

use deepspec_core::usage;

/// Writes results to standard output; a reader that stops reading (`| head`) has seen enough.
///
/// # Errors
/// If it cannot be written otherwise.
pub fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
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
