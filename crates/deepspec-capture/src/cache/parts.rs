//! The folders of workers, and leftover files in a cache's folder.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};
use serde::{Deserialize, Serialize};

use crate::cache::error::CacheError;
use crate::cache::files::parts_dir;
use crate::cache::identity::Recipe;
use crate::cache::manifest::{self, is_not_found};
use crate::cache::samples::SAMPLES_FILE;
use crate::cache::shard;

/// Name of the file in a worker's folder that has the identity of its build.
pub(crate) const CLAIM_FILE: &str = "build.json";

/// Name of the file in a worker's folder that says where its states come from.
const ORIGIN_FILE: &str = "origin.txt";

/// Writes where a worker's states come from.
pub(crate) fn write_origin(part: &Path, origin: &str) -> Result<(), CacheError> {
    Ok(atomic::replace(&part.join(ORIGIN_FILE), |file| file.write_all(origin.as_bytes()))?)
}

/// Name of the file in a worker's folder that says that its samples lack the states of their last
/// token.
const NO_LAST_TOKEN_FILE: &str = "no-last-token-states";

/// Notes that a worker's samples lack the states of their last token.
pub(crate) fn write_no_last_token(part: &Path) -> Result<(), CacheError> {
    Ok(atomic::replace(&part.join(NO_LAST_TOKEN_FILE), |_| Ok(()))?)
}

/// Whether samples of a worker lack the states of their last token.
pub(crate) fn lack_last_token(parts: &[PathBuf]) -> bool {
    parts.iter().any(|part| part.join(NO_LAST_TOKEN_FILE).exists())
}

/// Where the states of all workers come from; `None` for the target in this program.
pub(crate) fn read_origins(parts: &[PathBuf]) -> Option<String> {
    let mut origins: Vec<String> =
        parts.iter().filter_map(|part| fs::read_to_string(part.join(ORIGIN_FILE)).ok()).collect();
    origins.sort();
    origins.dedup();
    (!origins.is_empty()).then(|| origins.join("; "))
}

/// One of several processes that build a cache together without communication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Worker {
    index: usize,
    pub(crate) of: usize,
}

impl Worker {
    /// The only worker of a build.
    pub const ALONE: Self = Self { index: 0, of: 1 };

    /// Worker `index` of `of`, counted from 0; `None` if `index` is out of range.
    pub fn new(index: usize, of: usize) -> Option<Self> {
        (index < of).then_some(Self { index, of })
    }

    /// Whether the build has only this worker.
    pub fn is_alone(self) -> bool {
        self.of == 1
    }

    /// Whether shard `shard` belongs to this worker.
    pub fn builds(self, shard: usize) -> bool {
        shard % self.of == self.index
    }

    /// The worker's folder in `dir`.
    pub(crate) fn worker_dir(self, dir: &Path) -> PathBuf {
        parts_dir(dir).join(format!("worker-{:03}", self.index))
    }
}

impl fmt::Display for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.of)
    }
}

/// The content of `build.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Claim {
    /// Number of workers that share the shards.
    pub workers: usize,
    /// Number of shards in the whole build.
    pub shards: usize,
    pub build: Recipe,
}

impl Claim {
    /// Reads `build.json` of a worker's folder; `None` if there is none.
    pub fn read(part: &Path) -> Result<Option<Self>, CacheError> {
        let path = part.join(CLAIM_FILE);
        match fs::read(&path) {
            Ok(bytes) => {
                serde_json::from_slice(&bytes).map(Some).map_err(|source| CacheError::Json { path, source })
            }
            Err(error) if is_not_found(&error) => Ok(None),
            Err(error) => Err(FileError::at("reading", &path)(error).into()),
        }
    }
}

/// The workers' folders in `dir`, sorted; empty if no build is running.
pub(crate) fn worker_dirs(dir: &Path) -> Result<Vec<PathBuf>, CacheError> {
    let parts = parts_dir(dir);
    let entries = match fs::read_dir(&parts) {
        Ok(entries) => entries,
        Err(error) if is_not_found(&error) => return Ok(Vec::new()),
        Err(error) => return Err(FileError::at("reading", &parts)(error).into()),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(FileError::at("reading", &parts))?;
        if entry.file_name().to_string_lossy().starts_with("worker-") {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// Removes a cache or an unfinished build from `dir`, for `--overwrite`. Other files are kept.
///
/// The manifest is removed first, so that a kill never leaves a folder that looks like a cache.
///
/// # Errors
/// Fails on I/O failures, and if another process is building there.
pub fn remove_cache(dir: &Path) -> Result<(), CacheError> {
    let _locks: Vec<File> =
        worker_dirs(dir)?.iter().map(|part| lock_worker_dir(part)).collect::<Result<_, _>>()?;
    remove_if_present(&manifest::manifest_path(dir))?;
    for path in find_leftover_files(dir)? {
        remove_if_present(&path)?;
    }
    remove_if_present(&parts_dir(dir))
}

/// The shards and samples' tables in `dir`, complete or partial; empty if the folder does not
/// exist.
pub(crate) fn find_leftover_files(dir: &Path) -> Result<Vec<PathBuf>, CacheError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if is_not_found(&error) => return Ok(Vec::new()),
        Err(error) => return Err(FileError::at("reading", dir)(error).into()),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(FileError::at("reading", dir))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let whole = name.strip_suffix(".partial").unwrap_or(&name);
        if whole == SAMPLES_FILE || whole == manifest::MANIFEST_FILE || shard::is_file_name(whole) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// Locks the worker's folder for this process.
pub(crate) fn lock_worker_dir(part: &Path) -> Result<File, CacheError> {
    let path = part.join("lock");
    let open = || OpenOptions::new().write(true).create(true).truncate(false).open(&path);
    let file = open().map_err(FileError::at("opening", &path))?;
    match atomic::try_lock(&file, &path)? {
        true => Ok(file),
        false => Err(CacheError::Locked { dir: part.to_path_buf() }),
    }
}

pub(crate) fn remove_if_present(path: &Path) -> Result<(), CacheError> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if !is_not_found(&error) => Err(FileError::at("removing", path)(error).into()),
        _ => Ok(()),
    }
}
