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
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};

use crate::cache::error::CacheError;
use crate::cache::files::parts_dir;
use crate::cache::identity::Identity;
use crate::cache::identity::Recipe;
use crate::cache::manifest::{Manifest, is_absent};
use crate::cache::parts::{CLAIM_FILE, Claim, Worker, leftovers, lock, parts, remove_if_present};
use crate::cache::plan::Plan;
use crate::cache::samples::{self, Written};
use crate::cache::shard;
use crate::cache::writer::{ShardWriter, Sidecar};

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
    /// [`crate::cache::merge`], or [`Self::publish`] of any builder that sees all shards finished.
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

    /// Bytes of the worker's shards that `dir` lacks; the most, where an encoding compresses. Touches nothing.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn missing_bytes(dir: &Path, plan: &Plan, worker: Worker) -> Result<u64, CacheError> {
        if Manifest::read_if_present(dir)?.is_some() {
            return Ok(0);
        }
        let (parts, mut bytes) = (parts(dir)?, 0_u64);
        for (index, planned) in plan.shards().iter().enumerate().filter(|&(index, _)| worker.builds(index)) {
            if finished(dir, &parts, plan, index)?.is_none() {
                bytes = bytes.saturating_add(planned.geometry(plan.layout())?.bytes());
            }
        }
        Ok(bytes)
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
    let written: Vec<Written> = shards.iter().flat_map(|(_, sidecar)| sidecar.written()).collect();
    let entry = samples::write(dir, plan, &written)?;
    // All names must be on disk before the manifest vouches for them.
    sync_dir(dir)?;
    let shards = shards.into_iter().map(|(_, sidecar)| sidecar.shard).collect();
    let manifest = Manifest::new(recipe, entry, shards);
    manifest.write(dir)?;
    sync_dir(dir)?;
    remove_if_present(&parts_dir(dir))?;
    Ok(manifest)
}

/// Makes renames within `dir` durable.
fn sync_dir(dir: &Path) -> Result<(), CacheError> {
    let sync = || -> io::Result<()> { File::open(dir)?.sync_all() };
    Ok(sync().map_err(FileError::at("syncing", dir))?)
}
