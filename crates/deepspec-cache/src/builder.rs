//! Builds a cache shard by shard, resumes after a kill, publishes at the end.
//!
//! While it is built, a cache is one folder `parts/worker-NNN/` a worker with `build.json` (what is being built), finished
//! shards with two sidecars each, and at most one `.partial` per running writer. Publishing moves the shards up, then
//! writes the samples' table, then the manifest. A kill between any two of these steps is resumed by the next
//! [`Builder::open`], or by another merge.
//!
//! Shard k belongs to worker k mod n. What a shard holds does not depend on n, so any split of the work gives the same
//! cache, and a build may go on with another number of workers than it began with.

use std::collections::VecDeque;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};
use fs4::fs_std::FileExt;
use serde::{Deserialize, Serialize};

use crate::error::CacheError;
use crate::identity::Identity;
use crate::manifest::{self, Manifest, is_absent};
use crate::plan::{Plan, PlannedShard, Recipe};
use crate::samples::{self, SAMPLES_FILE};
use crate::shard::{self, Geometry};
use crate::writer::{ShardWriter, Sidecar};

/// What a worker's folder says about the build that it belongs to.
const CLAIM_FILE: &str = "build.json";

/// The folder of unfinished builds in `dir`.
pub(crate) fn parts_dir(dir: &Path) -> PathBuf {
    dir.join("parts")
}

/// One of several processes that build a cache together without talking to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Worker {
    index: usize,
    of: usize,
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

    fn part(self, dir: &Path) -> PathBuf {
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

/// A build of a plan into a folder.
#[derive(Debug)]
pub struct Builder<'p> {
    dir: PathBuf,
    part: PathBuf,
    plan: &'p Plan,
    recipe: Recipe,
    worker: Worker,
    pending: VecDeque<usize>,
    done_samples: usize,
    published: Option<Manifest>,
    /// Held until the builder is dropped; the system releases it after a kill.
    _lock: Option<File>,
}

impl<'p> Builder<'p> {
    /// Begins or resumes the build of `plan` in `dir`, which is created. Finished shards are kept.
    ///
    /// Where the very same cache is finished already, there is nothing pending and [`Self::publish`] returns its manifest.
    ///
    /// # Errors
    /// A plan that does not fit the identity, another build or cache in `dir`, another process at work, I/O failures.
    pub fn open(dir: &Path, plan: &'p Plan, identity: &Identity) -> Result<Self, CacheError> {
        Self::open_worker(dir, plan, identity, Worker::ALONE)
    }

    /// [`Self::open`] for one of several workers: only its shards are handed out. Nothing is published until
    /// [`crate::merge`], or [`Self::publish`] of any builder that sees all shards finished.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_worker(
        dir: &Path,
        plan: &'p Plan,
        identity: &Identity,
        worker: Worker,
    ) -> Result<Self, CacheError> {
        let recipe = plan.recipe(identity)?;
        let mut builder = Self {
            dir: dir.to_path_buf(),
            part: worker.part(dir),
            plan,
            recipe,
            worker,
            pending: VecDeque::new(),
            done_samples: 0,
            published: None,
            _lock: None,
        };
        if let Some(manifest) = Manifest::read_if_present(dir)? {
            builder.refuse_differences(&manifest.recipe(), true)?;
            remove_if_present(&parts_dir(dir))?;
            builder.done_samples = builder.samples();
            builder.published = Some(manifest);
            return Ok(builder);
        }
        if !parts_dir(dir).exists()
            && let Some(path) = leftovers(dir)?.into_iter().next()
        {
            return Err(CacheError::Leftover { path });
        }
        atomic::create_dir(&builder.part)?;
        builder._lock = Some(lock(&builder.part)?);
        builder.claim()?;
        let parts = parts(dir)?;
        for (index, planned) in plan.shards().iter().enumerate().filter(|&(index, _)| worker.builds(index)) {
            match finished(dir, &parts, plan, index)? {
                Some(_) => builder.done_samples += planned.samples.len(),
                None => builder.pending.push_back(index),
            }
        }
        Ok(builder)
    }

    /// Samples of all shards of this worker.
    pub fn samples(&self) -> usize {
        let shards = self.plan.shards().iter().enumerate();
        shards.filter(|&(index, _)| self.worker.builds(index)).map(|(_, shard)| shard.samples.len()).sum()
    }

    /// Samples in finished shards of this worker when the build was opened.
    pub fn done_samples(&self) -> usize {
        self.done_samples
    }

    /// Shards that have yet to be handed out.
    pub fn pending_shards(&self) -> usize {
        self.pending.len()
    }

    /// Bytes of the shards that have yet to be handed out.
    ///
    /// # Errors
    /// None in a plan that was made: its sizes have been computed before.
    pub fn pending_bytes(&self) -> Result<u64, CacheError> {
        self.pending.iter().try_fold(0_u64, |sum, &index| {
            let PlannedShard { rows, last_rows, .. } = self.plan.shards()[index];
            Ok(sum.saturating_add(Geometry::new(self.plan.layout(), rows, last_rows)?.bytes()))
        })
    }

    /// Starts the next unfinished shard; `None` when all are handed out. Several may be open at once.
    ///
    /// # Errors
    /// I/O failures.
    pub fn next_shard(&mut self) -> Result<Option<ShardWriter<'p>>, CacheError> {
        self.pending.pop_front().map(|shard| ShardWriter::create(&self.part, self.plan, shard)).transpose()
    }

    /// Makes the finished shards a cache: moves them up, writes the samples' table and, last, the manifest.
    ///
    /// # Errors
    /// A shard is not finished, I/O failures.
    pub fn publish(self) -> Result<Manifest, CacheError> {
        if let Some(manifest) = self.published {
            return Ok(manifest);
        }
        let parts = parts(&self.dir)?;
        let others = parts.iter().filter(|part| **part != self.part);
        let _locks: Vec<File> = others.map(|part| lock(part)).collect::<Result<_, _>>()?;
        let mut shards = Vec::with_capacity(self.plan.shards().len());
        let mut missing = Vec::new();
        for index in 0..self.plan.shards().len() {
            match finished(&self.dir, &parts, self.plan, index)? {
                Some(found) => shards.push(found),
                None => missing.push(index),
            }
        }
        if let Some(&missing) = missing.first() {
            let (found, expected) = (shards.len(), self.plan.shards().len());
            return Err(CacheError::Unfinished { dir: self.dir, found, expected, missing });
        }
        commit(&self.dir, self.plan, &self.recipe, shards)
    }

    /// Writes what is built into the worker's folder, or checks that it says the same.
    fn claim(&self) -> Result<(), CacheError> {
        let claim =
            Claim { workers: self.worker.of, shards: self.plan.shards().len(), build: self.recipe.clone() };
        match Claim::read(&self.part)? {
            Some(there) if there.workers == claim.workers => self.refuse_differences(&there.build, false),
            Some(there) => {
                self.refuse_differences(&there.build, false)?;
                Ok(atomic::write_json(&self.part.join(CLAIM_FILE), &claim)?)
            }
            None => Ok(atomic::write_json(&self.part.join(CLAIM_FILE), &claim)?),
        }
    }

    fn refuse_differences(&self, there: &Recipe, finished: bool) -> Result<(), CacheError> {
        let differences = there.differences(&self.recipe);
        match differences.is_empty() {
            true => Ok(()),
            false => Err(CacheError::BuildDiffers { dir: self.dir.clone(), finished, differences }),
        }
    }
}

/// A shard that is whole, and the worker's folder that vouches for it.
pub(crate) type Finished = (PathBuf, Sidecar);

/// The first of `parts` that has finished a shard.
pub(crate) fn finished(
    dir: &Path,
    parts: &[PathBuf],
    plan: &Plan,
    shard: usize,
) -> Result<Option<Finished>, CacheError> {
    for part in parts {
        if let Some(sidecar) = Sidecar::of_finished(dir, part, plan, shard)? {
            return Ok(Some((part.clone(), sidecar)));
        }
    }
    Ok(None)
}

/// Makes finished shards a cache: moves them up, writes the samples' table and, last, the manifest. May be repeated after
/// a kill at any point.
pub(crate) fn commit(
    dir: &Path,
    plan: &Plan,
    recipe: &Recipe,
    shards: Vec<Finished>,
) -> Result<Manifest, CacheError> {
    for (index, (part, _)) in shards.iter().enumerate() {
        let (from, to) = (shard::path(part, index), shard::path(dir, index));
        match fs::rename(&from, &to) {
            Err(error) if !is_absent(&error) => return Err(FileError::at("publishing", &from)(error).into()),
            _ => {} // An interrupted publication has moved it already.
        }
    }
    let checksums: Vec<u32> =
        shards.iter().flat_map(|(_, sidecar)| sidecar.checksums.iter().copied()).collect();
    let entry = samples::write(dir, plan, &checksums)?;
    // All names must be on disk before the manifest vouches for them.
    sync_dir(dir)?;
    let shards = shards.into_iter().map(|(_, sidecar)| sidecar.shard).collect();
    let manifest = Manifest::new(recipe, entry, shards);
    manifest.write(dir)?;
    sync_dir(dir)?;
    remove_if_present(&parts_dir(dir))?;
    Ok(manifest)
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
fn leftovers(dir: &Path) -> Result<Vec<PathBuf>, CacheError> {
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
    match file.try_lock_exclusive().map_err(FileError::at("locking", &path))? {
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

/// Makes renames within `dir` durable.
fn sync_dir(dir: &Path) -> Result<(), CacheError> {
    let sync = || -> io::Result<()> { File::open(dir)?.sync_all() };
    Ok(sync().map_err(FileError::at("syncing", dir))?)
}
