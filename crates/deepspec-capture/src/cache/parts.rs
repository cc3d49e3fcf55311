//! The folders in which workers build, and what lies about in a cache's folder.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};
use serde::{Deserialize, Serialize};

use crate::cache::error::CacheError;
use crate::cache::files::parts_dir;
use crate::cache::identity::Recipe;
use crate::cache::manifest::{self, is_absent};
use crate::cache::samples::SAMPLES_FILE;
use crate::cache::shard;

/// What a worker's folder says about the build that it belongs to.
pub(crate) const CLAIM_FILE: &str = "build.json";

/// One of several processes that build a cache together without talking to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Worker {
    index: usize,
    pub(crate) of: usize,
}

impl Worker {
    /// The only one.
    pub const ALONE: Self = Self { index: 0, of: 1 };

    /// Worker `index`, from 0, of `of`; `None` when there is no such worker.
    pub fn new(index: usize, of: usize) -> Option<Self> {
        (index < of).then_some(Self { index, of })
    }

    /// Whether there are no others.
    pub fn is_alone(self) -> bool {
        self.of == 1
    }

    /// Whether this worker builds a shard.
    pub fn builds(self, shard: usize) -> bool {
        shard % self.of == self.index
    }

    /// Its folder in `dir`.
    pub(crate) fn part(self, dir: &Path) -> PathBuf {
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
    /// Processes among which the shards are shared out.
    pub workers: usize,
    /// Shards of the whole build.
    pub shards: usize,
    pub build: Recipe,
}

impl Claim {
    /// The claim of a worker's folder; `None` where there is none yet.
    pub fn read(part: &Path) -> Result<Option<Self>, CacheError> {
        let path = part.join(CLAIM_FILE);
        match fs::read(&path) {
            Ok(bytes) => {
                serde_json::from_slice(&bytes).map(Some).map_err(|source| CacheError::Json { path, source })
            }
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(FileError::at("reading", &path)(error).into()),
        }
    }
}

/// The workers' folders in `dir`, in order; empty where nothing is being built.
pub(crate) fn parts(dir: &Path) -> Result<Vec<PathBuf>, CacheError> {
    let parts = parts_dir(dir);
    let entries = match fs::read_dir(&parts) {
        Ok(entries) => entries,
        Err(error) if is_absent(&error) => return Ok(Vec::new()),
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

/// Removes a cache or an unfinished build from `dir`, for `--overwrite`. Files that are no cache's are left alone.
///
/// The manifest goes first, so that what is left after a kill is not taken for a cache.
///
/// # Errors
/// I/O failures; another process that builds there.
pub fn remove_existing(dir: &Path) -> Result<(), CacheError> {
    let _locks: Vec<File> = parts(dir)?.iter().map(|part| lock(part)).collect::<Result<_, _>>()?;
    remove_if_present(&manifest::path(dir))?;
    for path in leftovers(dir)? {
        remove_if_present(&path)?;
    }
    remove_if_present(&parts_dir(dir))
}

/// The shards and samples' tables in `dir`, whole or partial; empty when there is no such folder.
pub(crate) fn leftovers(dir: &Path) -> Result<Vec<PathBuf>, CacheError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if is_absent(&error) => return Ok(Vec::new()),
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

/// Takes the worker's folder for this process.
pub(crate) fn lock(part: &Path) -> Result<File, CacheError> {
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
        Err(error) if !is_absent(&error) => Err(FileError::at("removing", path)(error).into()),
        _ => Ok(()),
    }
}
