//! Atomic creation of folders.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError, PartialLock};
use deepspec_core::digest;

use crate::CheckpointError;

/// Lets `fill` write a temporary folder, then renames it to `dir`. `overwrite` replaces an existing
/// folder if `own` accepts all its file names. Without `overwrite`, an existing folder with equal
/// files stays as it is.
///
/// # Errors
/// Fails if the folder exists with other content, if `fill` fails, or on any I/O error.
pub fn write_folder_atomically(
    dir: &Path,
    overwrite: bool,
    own: impl Fn(&str) -> bool,
    fill: impl FnOnce(&Path) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let bad = |problem: String| CheckpointError::NotADrafter { path: dir.to_path_buf(), problem };
    if dir.exists() {
        let entries = fs::read_dir(dir).map_err(FileError::at("reading", dir))?;
        let mut names =
            entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()));
        if let Some(other) = names.find(|name| overwrite && !own(name)) {
            return Err(bad(format!(
                "it holds {other} too and is not replaced; remove it, or choose another folder"
            )));
        }
    }
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        atomic::create_dir(parent)?;
    }
    // The lock is a separate file next to the folder.
    let Some(_lock) = PartialLock::try_acquire(&sibling_path(dir, ".lock"))? else {
        return Err(bad("another process is writing it; wait for it, or end it".into()));
    };
    let partial = sibling_path(dir, ".partial");
    remove_if_exists(&partial)?;
    atomic::create_dir(&partial)?;
    fill(&partial)?;
    if dir.exists() && !overwrite {
        let same = has_same_files(&partial, dir)?;
        remove_if_exists(&partial)?;
        return match same {
            true => Ok(()),
            false => Err(CheckpointError::Exists { path: dir.to_path_buf() }),
        };
    }
    let old = sibling_path(dir, ".old");
    if dir.exists() {
        remove_if_exists(&old)?;
        fs::rename(dir, &old).map_err(FileError::at("moving aside", dir))?;
    }
    fs::rename(&partial, dir).map_err(FileError::at("writing", dir))?;
    remove_if_exists(&old)
}

/// Whether `other` has each file of `one` with the same bytes. Two names of one file need no reading.
fn has_same_files(one: &Path, other: &Path) -> Result<bool, CheckpointError> {
    for entry in fs::read_dir(one).map_err(FileError::at("reading", one))? {
        let file = entry.map_err(FileError::at("reading", one))?.path();
        let counterpart = other.join(file.file_name().unwrap_or_default());
        let place = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
        if place(&file).is_some_and(|own| place(&counterpart) == Some(own)) {
            continue;
        }
        let bytes = |path: &Path| fs::metadata(path).map(|found| found.len()).ok();
        if bytes(&file) != bytes(&counterpart)
            || digest::sha256_of_file(&file)? != digest::sha256_of_file(&counterpart)?
        {
            return Ok(false);
        }
    }
    Ok(true)
}

fn sibling_path(dir: &Path, suffix: &str) -> PathBuf {
    let mut name: OsString = dir.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Removes a folder that an earlier attempt left.
fn remove_if_exists(dir: &Path) -> Result<(), CheckpointError> {
    if dir.exists() {
        fs::remove_dir_all(dir).map_err(FileError::at("removing", dir))?;
    }
    Ok(())
}
