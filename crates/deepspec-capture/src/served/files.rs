//! Files of hidden states that a vLLM server leaves in a shared folder.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::Failure;

/// First and longest pause between two looks for a file.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(20)];
/// Shortest pause between two sweeps of the folder.
const MIN_SWEEP_INTERVAL: Duration = Duration::from_secs(60);

/// Reads a file that a server names in its answer, and deletes it. Waits up to `limit` until it is
/// written. It must lie in `folder`.
///
/// # Errors
/// [`Failure::Request`] if the server writes no file. [`Failure::Final`] if the file lies elsewhere,
/// or this user may not read it.
pub async fn take_states(folder: &Path, path: &str, limit: Duration) -> Result<Vec<u8>, Failure> {
    let file = StateFile::within(folder, path)?;
    let bytes = tokio::task::spawn_blocking(move || file.read(limit)).await;
    bytes.unwrap_or_else(|error| Err(Failure::Request(error.to_string())))
}

/// A file of states and its lock, which are deleted when this is dropped.
struct StateFile {
    path: PathBuf,
    lock: PathBuf,
}

impl StateFile {
    /// The file at `path`, which must lie in `folder`.
    ///
    /// # Errors
    /// If it lies elsewhere, or the folder cannot be read.
    fn within(folder: &Path, path: &str) -> Result<Self, Failure> {
        let file = Path::new(path);
        let parent = file.parent().unwrap_or(Path::new("/"));
        let here = fs::canonicalize(folder).map_err(|error| {
            Failure::Final(format!("{}: {error}; the server's folder must be readable here under its path, or an agent runs beside the server", folder.display()))
        })?;
        let is_inside = fs::canonicalize(parent).is_ok_and(|parent| parent == here);
        let is_plain = file.extension().is_some_and(|kind| kind == "safetensors");
        if !is_inside || !is_plain || file.file_name().is_none() {
            return Err(Failure::Final(format!(
                "the server names the file {path}, which is no safetensors file in {}; start it with that folder as shared_storage_path, or name its folder (data.states.folder, or --states-folder)",
                folder.display()
            )));
        }
        let path = here.join(file.file_name().unwrap_or_default());
        let mut lock = path.clone().into_os_string();
        lock.push(".lock");
        Ok(Self { path, lock: lock.into() })
    }

    /// Waits until the server has written the file, and reads it.
    ///
    /// # Errors
    /// [`Failure::Request`] if the server released its lock without a file, or `limit` passed.
    /// [`Failure::Final`] if this user may not read the file.
    fn read(&self, limit: Duration) -> Result<Vec<u8>, Failure> {
        let started = Instant::now();
        let mut pause = PAUSES[0];
        loop {
            if self.is_written()? {
                return fs::read(&self.path).map_err(|error| self.explain(&error));
            }
            if started.elapsed() >= limit {
                return Err(Failure::Request(format!(
                    "{}: not written within {} s of the answer",
                    self.path.display(),
                    limit.as_secs()
                )));
            }
            thread::sleep(pause);
            pause = (2 * pause).min(PAUSES[1]);
        }
    }

    /// Whether the file is complete. The server holds an exclusive lock until then, if it uses
    /// locks; without a lock, the file appears by a rename.
    fn is_written(&self) -> Result<bool, Failure> {
        match File::open(&self.lock) {
            Ok(lock) => match lock.try_lock_shared() {
                Ok(()) if self.path.exists() => Ok(true),
                Ok(()) => Err(Failure::Request(format!(
                    "{}: the server released its lock without writing the file; its disk may be full, its log says more",
                    self.path.display()
                ))),
                Err(TryLockError::WouldBlock) => Ok(false),
                Err(TryLockError::Error(error)) => Err(self.explain(&error)),
            },
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(self.path.exists()),
            Err(error) => Err(self.explain(&error)),
        }
    }

    fn explain(&self, error: &io::Error) -> Failure {
        let path = self.path.display();
        match error.kind() {
            ErrorKind::PermissionDenied => Failure::Final(format!(
                "{path}: {error}; vLLM writes files that only its own user may read: run both as one user"
            )),
            _ => Failure::Request(format!("{path}: {error}")),
        }
    }
}

impl Drop for StateFile {
    fn drop(&mut self) {
        for path in [&self.path, &self.lock] {
            match fs::remove_file(path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    tracing::warn!("{}: {error}; delete it", path.display());
                }
                _ => {}
            }
        }
    }
}

/// Whether vLLM names files so: `cmpl-<id>-<8 hexadecimal digits>.safetensors` and the like. Weights
/// and shards of caches have other names.
fn is_name_of_request(name: &str) -> bool {
    let Some(stem) = name.strip_suffix(".safetensors") else { return false };
    let is_hex = |end: &str| end.len() == 8 && end.bytes().all(|byte| byte.is_ascii_hexdigit());
    stem.contains("cmpl-") && stem.rsplit_once('-').is_some_and(|(_, end)| is_hex(end))
}

/// Deletes files of states and locks in `folder` that are at least `age` old: those of requests
/// whose client was killed. Returns their number.
///
/// # Errors
/// If the folder cannot be listed.
pub fn sweep_leftovers(folder: &Path, age: Duration) -> io::Result<usize> {
    let mut swept = 0;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_ours = is_name_of_request(name.strip_suffix(".lock").unwrap_or(&name));
        let modified = fs::symlink_metadata(&path).and_then(|metadata| metadata.modified());
        let is_old =
            modified.is_ok_and(|time| SystemTime::now().duration_since(time).unwrap_or_default() >= age);
        if is_ours && is_old && fs::remove_file(&path).is_ok() {
            swept += 1;
        }
    }
    Ok(swept)
}

/// Creates the folder, and deletes old leftovers of other clients now and as long as it is awaited.
pub async fn sweep_regularly(folder: PathBuf, age: Duration) {
    loop {
        sweep(&folder, age);
        tokio::time::sleep(age.max(MIN_SWEEP_INTERVAL)).await;
    }
}

/// Creates the folder and deletes old leftovers.
pub fn sweep(folder: &Path, age: Duration) {
    match fs::create_dir_all(folder).and_then(|()| sweep_leftovers(folder, age)) {
        Ok(0) => {}
        Ok(count) => tracing::info!("{}: {count} files of earlier runs were deleted", folder.display()),
        Err(error) => tracing::warn!("{}: {error}", folder.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);
    /// Files of others, which no sweep deletes.
    const KEPT: [&str; 4] =
        ["notes.txt", "model-00001-of-00004.safetensors", "shard-00000.safetensors", "cmpl-1-0.safetensors"];

    fn file_in(folder: &Path) -> StateFile {
        StateFile::within(folder, &folder.join("cmpl-1-0-abcdef01.safetensors").display().to_string())
            .unwrap()
    }

    #[test]
    fn paths_outside_the_folder_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("sub");
        fs::create_dir(&inside).unwrap();
        for path in
            ["/etc/x.safetensors", "x.safetensors", &inside.join("x.safetensors").display().to_string()]
        {
            let Err(Failure::Final(problem)) = StateFile::within(folder.path(), path) else {
                panic!("{path}")
            };
            assert!(problem.contains("data.states.folder"), "{problem}");
        }
        let dotted = inside.join("../x.safetensors").display().to_string();
        assert!(StateFile::within(folder.path(), &dotted).is_ok());
    }

    #[test]
    fn a_late_file_is_waited_for_and_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let file = file_in(folder.path());
        let lock = File::create(&file.lock).unwrap();
        lock.lock().unwrap();
        let bytes = thread::scope(|scope| {
            let reader = scope.spawn(|| file.read(LIMIT));
            fs::write(&file.path, b"states").unwrap();
            drop(lock);
            reader.join().unwrap()
        });
        assert_eq!(bytes.unwrap(), b"states");
        drop(file);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_free_lock_without_a_file_is_a_failed_write() {
        let folder = tempfile::tempdir().unwrap();
        let file = file_in(folder.path());
        File::create(&file.lock).unwrap();
        let Err(Failure::Request(problem)) = file.read(LIMIT) else { panic!("there is no file") };
        assert!(problem.contains("without writing the file"), "{problem}");
    }

    #[test]
    fn a_file_that_never_comes_ends_the_wait() {
        let folder = tempfile::tempdir().unwrap();
        let Err(Failure::Request(problem)) = file_in(folder.path()).read(Duration::ZERO) else { panic!() };
        assert!(problem.contains("not written within 0 s"), "{problem}");
    }

    #[test]
    fn only_old_files_of_servers_are_swept() {
        let folder = tempfile::tempdir().unwrap();
        for name in
            ["cmpl-1-0-abcdef01.safetensors", "cmpl-1-0-abcdef01.safetensors.lock"].into_iter().chain(KEPT)
        {
            fs::write(folder.path().join(name), b"").unwrap();
        }
        assert_eq!(sweep_leftovers(folder.path(), LIMIT).unwrap(), 0);
        assert_eq!(sweep_leftovers(folder.path(), Duration::ZERO).unwrap(), 2);
        assert!(KEPT.iter().all(|name| folder.path().join(name).exists()));
    }
}
