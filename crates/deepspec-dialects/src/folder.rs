//! Folders that appear whole or not at all.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};

use crate::DialectError;

/// Has `fill` write a folder beside `dir` and renames it into place. `overwrite` replaces a folder whose files all are `own`.
///
/// # Errors
/// If the folder exists and may not be replaced, what `fill` says, or any I/O failure.
pub fn replace(
    dir: &Path,
    overwrite: bool,
    own: impl Fn(&str) -> bool,
    fill: impl FnOnce(&Path) -> Result<(), DialectError>,
) -> Result<(), DialectError> {
    let bad = |problem: String| DialectError::NotADrafter { path: dir.to_path_buf(), problem };
    if dir.exists() {
        if !overwrite {
            return Err(bad("exists already; --overwrite replaces it".into()));
        }
        let entries = fs::read_dir(dir).map_err(FileError::at("reading", dir))?;
        let mut names =
            entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()));
        if let Some(other) = names.find(|name| !own(name)) {
            return Err(bad(format!(
                "it holds {other} too and is not replaced; remove it, or choose another folder"
            )));
        }
    }
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        atomic::create_dir(parent)?;
    }
    let partial = beside(dir, ".partial");
    clear(&partial)?;
    atomic::create_dir(&partial)?;
    fill(&partial)?;
    let old = beside(dir, ".old");
    if dir.exists() {
        clear(&old)?;
        fs::rename(dir, &old).map_err(FileError::at("moving aside", dir))?;
    }
    fs::rename(&partial, dir).map_err(FileError::at("writing", dir))?;
    clear(&old)
}

fn beside(dir: &Path, suffix: &str) -> PathBuf {
    let mut name: OsString = dir.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Removes what an earlier attempt left.
fn clear(dir: &Path) -> Result<(), DialectError> {
    if dir.exists() {
        fs::remove_dir_all(dir).map_err(FileError::at("removing", dir))?;
    }
    Ok(())
}
