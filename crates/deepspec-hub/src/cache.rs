//! The cache of downloads, in the layout of the Python `huggingface_hub`, so that the Python tools
//! can use it too: `models--owner--name/{blobs/ETAG, refs/REVISION, snapshots/COMMIT/PATH ->
//! blob}`, with lock files beside it. This project adds `.deepspec/COMMIT.json`, which the Python
//! tools ignore: the paths of all files of a commit, downloaded or not.

use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use deepspec_core::atomic::{self, FileError};

use crate::Repo;
use crate::repo::is_safe_path;

/// The cache of one repository.
pub struct RepoCache {
    names: hf_hub::CacheRepo,
    folder: PathBuf,
    locks: PathBuf,
}

impl RepoCache {
    pub fn new(cache: &Path, repo: &Repo) -> Self {
        let name = repo.to_hf_repo(repo.revision()).folder_name();
        let names = hf_hub::Cache::new(cache.to_path_buf()).repo(repo.to_hf_repo(repo.revision()));
        Self { names, folder: cache.join(&name), locks: cache.join(".locks").join(name) }
    }

    /// Path of the blob with that ETag.
    pub fn blob_path(&self, etag: &str) -> PathBuf {
        self.names.blob_path(etag)
    }

    /// Snapshot folder of a commit, with its files as links to blobs.
    pub fn snapshot_dir(&self, commit: &str) -> PathBuf {
        self.names.pointer_path(commit)
    }

    /// The commit to which the hub last resolved a revision. None if the cache has no snapshot of
    /// that commit.
    pub fn cached_commit(&self, revision: &str) -> Option<String> {
        let named = fs::read_to_string(self.folder.join("refs").join(revision)).ok();
        let commit = named.map(|text| text.trim().to_string()).filter(|commit| is_safe_path(commit));
        let commit = commit.unwrap_or_else(|| revision.to_string());
        self.snapshot_dir(&commit).is_dir().then_some(commit)
    }

    /// Records which commit a revision points to.
    pub fn record_revision(&self, revision: &str, commit: &str) -> Result<(), FileError> {
        let path = self.folder.join("refs").join(revision);
        if revision == commit || fs::read_to_string(&path).is_ok_and(|text| text == commit) {
            return Ok(());
        }
        create_parent(&path)?;
        let temporary = temporary_path(&self.folder);
        let write = || fs::write(&temporary, commit).and_then(|()| fs::rename(&temporary, &path));
        write().map_err(FileError::at("writing", &path))
    }

    /// Paths of the cached files of a commit, sorted.
    pub fn cached_files(&self, commit: &str) -> Result<Vec<String>, FileError> {
        let (top, mut found) = (self.snapshot_dir(commit), vec![]);
        collect_file_paths(&top, &top, &mut found).map_err(FileError::at("reading", &top))?;
        found.sort();
        Ok(found)
    }

    /// Records which files a commit has, so that a later run can detect missing ones.
    pub fn record_files(&self, commit: &str, files: &[String]) -> Result<(), FileError> {
        if self.all_files(commit).is_some_and(|known| known == files) {
            return Ok(());
        }
        let path = self.file_list_path(commit);
        create_parent(&path)?;
        let temporary = temporary_path(&self.folder);
        let write = || -> io::Result<()> {
            fs::write(&temporary, serde_json::to_vec(files)?)?;
            fs::rename(&temporary, &path)
        };
        write().map_err(FileError::at("writing", &path))
    }

    /// Paths of all files of a commit, sorted, if they were recorded.
    pub fn all_files(&self, commit: &str) -> Option<Vec<String>> {
        serde_json::from_slice(&fs::read(self.file_list_path(commit)).ok()?).ok()
    }

    fn file_list_path(&self, commit: &str) -> PathBuf {
        self.folder.join(".deepspec").join(format!("{commit}.json"))
    }

    /// Locks the blob with that ETag against other processes, the Python tools included, until the
    /// returned file is dropped.
    pub fn lock_blob(&self, etag: &str) -> Result<File, FileError> {
        let path = self.locks.join(format!("{etag}.lock"));
        create_parent(&path)?;
        let open = || -> io::Result<File> {
            let file = File::options().create(true).truncate(false).write(true).open(&path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(fs::TryLockError::WouldBlock) => {
                    tracing::info!("another process is fetching the same file; waiting for it");
                    file.lock()?;
                }
                // Without file locks, each process still checks the content before keeping it.
                Err(fs::TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                    tracing::debug!("{}: no locks here", path.display());
                }
                Err(fs::TryLockError::Error(error)) => return Err(error),
            }
            Ok(file)
        };
        open().map_err(FileError::at("locking", &path))
    }

    /// Creates the link `file` in the commit's snapshot folder, which points to the blob with that
    /// ETag. Returns the link's path.
    pub fn link_into_snapshot(&self, etag: &str, commit: &str, file: &str) -> Result<PathBuf, FileError> {
        let (blob, pointer) = (self.blob_path(etag), self.snapshot_dir(commit).join(file));
        create_parent(&pointer)?;
        // From the file's folder up to `snapshots/COMMIT`, then to the repository's folder.
        let up: PathBuf = Path::new(file).components().map(|_| Component::ParentDir).collect();
        let to = up.join("..").join("blobs").join(etag);
        let temporary = temporary_path(&self.folder);
        let link = || -> io::Result<()> {
            match symlink(&to, &temporary) {
                Ok(()) => fs::rename(&temporary, &pointer),
                // Without symbolic links, the blob itself moves into the snapshot.
                Err(_) => fs::rename(&blob, &pointer),
            }
        };
        link().map_err(FileError::at("writing", &pointer))?;
        Ok(pointer)
    }
}

/// A unique temporary path in `folder` for a file that is renamed into place.
fn temporary_path(folder: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    folder.join(format!(".aside-{}-{count}", std::process::id()))
}

#[cfg(unix)]
fn symlink(to: &Path, at: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(to, at)
}

#[cfg(not(unix))]
fn symlink(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Creates the folder of `path`.
pub fn create_parent(path: &Path) -> Result<(), FileError> {
    path.parent().map_or(Ok(()), atomic::create_dir)
}

fn collect_file_paths(top: &Path, dir: &Path, found: &mut Vec<String>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        // Follows links. A dangling link means that its blob was deleted.
        match fs::metadata(&path) {
            Ok(kind) if kind.is_dir() => collect_file_paths(top, &path, found)?,
            Ok(_) => {
                let inside = path.strip_prefix(top).unwrap_or(&path);
                found.extend(inside.to_str().map(|name| name.replace('\\', "/")));
            }
            Err(_) => {}
        }
    }
    Ok(())
}
