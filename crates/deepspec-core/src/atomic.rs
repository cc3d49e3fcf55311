//! Files that appear whole or not at all.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

/// An I/O failure together with the file it happened to.
#[derive(Debug, thiserror::Error)]
#[error("{action} {}: {source}", path.display())]
pub struct FileError {
    /// What was attempted, as a verb ("reading", "writing").
    pub action: &'static str,
    /// The file or folder concerned.
    pub path: PathBuf,
    /// The cause reported by the operating system.
    #[source]
    pub source: io::Error,
}

impl FileError {
    /// Attaches `path` to an I/O error: `.map_err(FileError::at("reading", path))`.
    pub fn at(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self { action, path, source }
    }
}

/// The name under which `path` is written before it is complete.
pub fn partial_name(path: &Path) -> PathBuf {
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(".partial");
    PathBuf::from(name)
}

/// Writes `path` aside, syncs it and renames it into place, so that a reader sees the old file or the whole new one.
///
/// # Errors
/// Any I/O failure, with the path; the partial file is left for inspection and overwritten by the next attempt.
pub fn replace(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), FileError> {
    let partial = partial_name(path);
    let attempt = || -> io::Result<()> {
        let mut writer = BufWriter::new(File::create(&partial)?);
        write(&mut writer)?;
        writer.flush()?;
        writer.get_ref().sync_all()?;
        fs::rename(&partial, path)
    };
    attempt().map_err(FileError::at("writing", path))
}

/// [`replace`]s `path` with `value` as indented JSON and a final newline.
///
/// # Errors
/// As [`replace`].
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<(), FileError> {
    replace(path, |file| {
        serde_json::to_writer_pretty(&mut *file, value)?;
        file.write_all(b"\n")
    })
}

/// Reads a whole text file.
///
/// # Errors
/// Any I/O failure, with the path.
pub fn read_text(path: &Path) -> Result<String, FileError> {
    fs::read_to_string(path).map_err(FileError::at("reading", path))
}

/// Creates a folder and its parents.
///
/// # Errors
/// Any I/O failure, with the path.
pub fn create_dir(path: &Path) -> Result<(), FileError> {
    fs::create_dir_all(path).map_err(FileError::at("creating", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("value.json");
        write_json(&path, &1).unwrap();
        let failed = replace(&path, |file| {
            file.write_all(b"half")?;
            Err(io::Error::other("disk gone"))
        });
        assert!(failed.unwrap_err().to_string().contains("value.json"));
        assert_eq!(read_text(&path).unwrap(), "1\n");
    }
}
