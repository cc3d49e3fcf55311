//! Atomic file writes.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// An I/O error with the file concerned.
#[derive(Debug, thiserror::Error)]
#[error("{action} {}: {source}", path.display())]
pub struct FileError {
    /// The attempted action, as a verb ("reading", "writing").
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

/// Path of the temporary file for `path`: `path` with the suffix `.partial`.
pub fn partial_path(path: &Path) -> PathBuf {
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(".partial");
    PathBuf::from(name)
}

/// Writes a partial file, syncs it and renames it to `path`. A reader sees either the old file or
/// the complete new one.
///
/// # Errors
/// Fails on any I/O error, with the path. The partial file remains for inspection, and the next
/// attempt overwrites it.
pub fn replace(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), FileError> {
    let partial = partial_path(path);
    let attempt = || -> io::Result<()> {
        let mut writer = BufWriter::new(File::create(&partial)?);
        write(&mut writer)?;
        writer.flush()?;
        writer.get_ref().sync_all()?;
        fs::rename(&partial, path)
    };
    attempt().map_err(FileError::at("writing", path))?;
    sync_folder_of(path);
    Ok(())
}

/// Syncs the folder of `path`, so that new file names survive a machine crash. A failure is only
/// logged, because some file systems cannot sync a folder.
pub fn sync_folder_of(path: &Path) {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let Err(error) = File::open(parent).and_then(|folder| folder.sync_all()) {
        tracing::debug!("{} is not synced: {error}", parent.display());
    }
}

/// Locks a file for this process until it is closed; false if another process holds the lock. On a
/// file system without locks (some Lustre and NFS mounts) it warns and returns true.
///
/// # Errors
/// Fails on any other I/O error, with the path.
pub fn try_lock(file: &File, path: &Path) -> Result<bool, FileError> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) if has_no_locks(&error) => {
            tracing::warn!(
                "{}: the file system has no locks ({error}); do not start a second process with this output",
                path.display()
            );
            Ok(true)
        }
        Err(TryLockError::Error(error)) => Err(FileError::at("locking", path)(error)),
    }
}

/// Whether a locking error means that the file system has no locks.
fn has_no_locks(error: &io::Error) -> bool {
    // ENOLCK: the lock service of an NFS mount is unavailable.
    const ENOLCK: i32 = 37;
    error.kind() == io::ErrorKind::Unsupported || error.raw_os_error() == Some(ENOLCK)
}

/// The lock on the temporary file of a path; see [`partial_path`]. Dropping the lock removes the
/// temporary file unless it was published.
#[derive(Debug)]
pub struct PartialLock {
    path: PathBuf,
    partial: PathBuf,
    file: File,
}

impl PartialLock {
    /// Creates and locks the temporary file of `path`. Returns `None` if another process holds the
    /// lock.
    ///
    /// # Errors
    /// Fails on any I/O error, with the path.
    pub fn try_acquire(path: &Path) -> Result<Option<Self>, FileError> {
        let partial = partial_path(path);
        loop {
            let open = File::options().write(true).create(true).truncate(false).open(&partial);
            let file = open.map_err(FileError::at("writing", path))?;
            if !try_lock(&file, &partial)? {
                return Ok(None);
            }
            // The previous holder may have renamed or removed the opened file.
            let is_same = fs::metadata(&partial)
                .ok()
                .zip(file.metadata().ok())
                .is_some_and(|(a, b)| a.ino() == b.ino());
            if is_same {
                file.set_len(0).map_err(FileError::at("writing", path))?;
                return Ok(Some(Self { path: path.to_path_buf(), partial, file }));
            }
        }
    }

    /// Truncates the partial file and returns a new write handle to it.
    ///
    /// # Errors
    /// Fails on any I/O error, with the path.
    pub fn reopen_truncated(&self) -> Result<File, FileError> {
        let open = File::options().write(true).truncate(true).open(&self.partial);
        open.map_err(FileError::at("writing", &self.path))
    }

    /// Renames the partial file to its final name.
    ///
    /// # Errors
    /// Fails on any I/O error, with the path.
    pub fn publish(&self) -> Result<(), FileError> {
        fs::rename(&self.partial, &self.path).map_err(FileError::at("writing", &self.path))?;
        sync_folder_of(&self.path);
        Ok(())
    }
}

impl Drop for PartialLock {
    fn drop(&mut self) {
        let own = self.file.metadata().ok().map(|metadata| metadata.ino());
        if fs::metadata(&self.partial).ok().map(|metadata| metadata.ino()) == own {
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// [`replace`]s `path` with `value` as indented JSON and a final newline.
///
/// # Errors
/// Fails as [`replace`] does.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<(), FileError> {
    replace(path, |file| {
        serde_json::to_writer_pretty(&mut *file, value)?;
        file.write_all(b"\n")
    })
}

/// Reads a whole text file.
///
/// # Errors
/// Fails on any I/O error, with the path.
pub fn read_text(path: &Path) -> Result<String, FileError> {
    let text = fs::read_to_string(path).map_err(FileError::at("reading", path))?;
    // Editors on Windows write a byte order mark.
    Ok(match text.strip_prefix('\u{feff}') {
        Some(rest) => rest.to_string(),
        None => text,
    })
}

/// Creates a folder and its parents.
///
/// # Errors
/// Fails on any I/O error, with the path.
pub fn create_dir(path: &Path) -> Result<(), FileError> {
    fs::create_dir_all(path).map_err(FileError::at("creating", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_at_a_time_writes_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        let lock = PartialLock::try_acquire(&path).unwrap().unwrap();
        assert!(PartialLock::try_acquire(&path).unwrap().is_none());
        lock.reopen_truncated().unwrap().write_all(b"a").unwrap();
        lock.publish().unwrap();
        let second = PartialLock::try_acquire(&path).unwrap().unwrap();
        // Dropping the first lock does not remove the second lock's file.
        drop(lock);
        assert!(partial_path(&path).exists());
        drop(second);
        assert!(!partial_path(&path).exists());
        assert_eq!(read_text(&path).unwrap(), "a");
    }

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
