//! Builds a cache shard by shard, resumes after a kill, and publishes at the end.
//!
//! During a build, each worker has a folder `parts/worker-NNN/`. It holds `build.json` (the
//! identity of the build), finished shards with two sidecars each, and one `.partial` file per
//! running writer. Publishing moves the shards up, then writes the samples' table, then the
//! manifest. After a kill between any of these steps, the next [`Builder::open`] or merge resumes.
//!
//! Worker k mod n builds shard k. The content of a shard does not depend on n: any split of the
//! work gives an equal cache. A build may continue with another number of workers.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};

use crate::cache::error::CacheError;
use crate::cache::files::parts_dir;
use crate::cache::identity::Identity;
use crate::cache::identity::Recipe;
use crate::cache::manifest::{Manifest, is_not_found};
use crate::cache::parts::{
    CLAIM_FILE, Claim, Worker, find_leftover_files, lack_last_token, lock_worker_dir, read_origins,
    remove_if_present, worker_dirs, write_no_last_token, write_origin,
};
use crate::cache::plan::Plan;
use crate::cache::samples::{self, WrittenSample};
use crate::cache::shard;
use crate::cache::writer::{ShardMeta, ShardWriter};

/// The build of a plan in a folder.
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
    /// Lock file, held until the builder is dropped. The system releases it after a kill.
    _lock: Option<File>,
}

impl<'p> Builder<'p> {
    /// Starts or resumes the build of `plan` in `dir`, which is created. Finished shards are kept.
    ///
    /// If an equal cache is finished already, nothing is pending and [`Self::publish`] returns its
    /// manifest.
    ///
    /// # Errors
    /// Fails if the plan does not fit the identity, or if `dir` has another build or cache. Also
    /// fails if another process is building there, and on I/O failures.
    pub fn open(dir: &Path, plan: &'p Plan, identity: &Identity) -> Result<Self, CacheError> {
        Self::open_worker(dir, plan, identity, Worker::ALONE)
    }

    /// [`Self::open`] for one of several workers, which builds only its own shards.
    /// [`crate::cache::merge`] publishes the cache, or [`Self::publish`] of any builder that finds
    /// all shards finished.
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
            part: worker.worker_dir(dir),
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
            && let Some(path) = find_leftover_files(dir)?.into_iter().next()
        {
            return Err(CacheError::Leftover { path });
        }
        atomic::create_dir(&builder.part)?;
        builder._lock = Some(lock_worker_dir(&builder.part)?);
        builder.write_or_check_claim()?;
        let parts = worker_dirs(dir)?;
        for (index, planned) in plan.shards().iter().enumerate().filter(|&(index, _)| worker.builds(index)) {
            match find_finished_shard(dir, &parts, plan, index)? {
                Some(_) => builder.done_samples += planned.samples.len(),
                None => builder.pending.push_back(index),
            }
        }
        Ok(builder)
    }

    /// Records where the states come from, for the manifest.
    ///
    /// # Errors
    /// I/O failures.
    pub fn set_origin(&self, origin: &str) -> Result<(), CacheError> {
        write_origin(&self.part, origin)
    }

    /// Notes in the manifest that samples lack the states of their last token.
    ///
    /// # Errors
    /// If the note cannot be written.
    pub fn set_no_last_token_states(&self) -> Result<(), CacheError> {
        write_no_last_token(&self.part)
    }

    /// Number of samples in all shards of this worker.
    pub fn samples(&self) -> usize {
        let shards = self.plan.shards().iter().enumerate();
        shards.filter(|&(index, _)| self.worker.builds(index)).map(|(_, shard)| shard.samples.len()).sum()
    }

    /// Number of samples in this worker's finished shards when the build was opened.
    pub fn done_samples(&self) -> usize {
        self.done_samples
    }

    /// Number of shards that [`Self::next_shard`] has not returned yet.
    pub fn pending_shards(&self) -> usize {
        self.pending.len()
    }

    /// Bytes of the worker's shards that are missing in `dir`; an upper bound if the encoding
    /// compresses. Writes nothing.
    ///
    /// # Errors
    /// Fails if a file cannot be read.
    pub fn missing_bytes(dir: &Path, plan: &Plan, worker: Worker) -> Result<u64, CacheError> {
        if Manifest::read_if_present(dir)?.is_some() {
            return Ok(0);
        }
        let (parts, mut bytes) = (worker_dirs(dir)?, 0_u64);
        for (index, planned) in plan.shards().iter().enumerate().filter(|&(index, _)| worker.builds(index)) {
            if find_finished_shard(dir, &parts, plan, index)?.is_none() {
                bytes = bytes.saturating_add(planned.geometry(plan.layout())?.bytes());
            }
        }
        Ok(bytes)
    }

    /// Starts the next unfinished shard; `None` after the last one. Several shards may be open at
    /// once.
    ///
    /// # Errors
    /// I/O failures.
    pub fn next_shard(&mut self) -> Result<Option<ShardWriter<'p>>, CacheError> {
        self.pending.pop_front().map(|shard| ShardWriter::create(&self.part, self.plan, shard)).transpose()
    }

    /// Publishes the finished shards as a cache. Moves them into the cache's folder, then writes
    /// the samples' table, and the manifest last.
    ///
    /// # Errors
    /// Fails if a shard is not finished, and on I/O failures.
    pub fn publish(self) -> Result<Manifest, CacheError> {
        if let Some(manifest) = self.published {
            return Ok(manifest);
        }
        let parts = worker_dirs(&self.dir)?;
        let others = parts.iter().filter(|part| **part != self.part);
        let _locks: Vec<File> = others.map(|part| lock_worker_dir(part)).collect::<Result<_, _>>()?;
        let mut shards = Vec::with_capacity(self.plan.shards().len());
        let mut missing = Vec::new();
        for index in 0..self.plan.shards().len() {
            match find_finished_shard(&self.dir, &parts, self.plan, index)? {
                Some(found) => shards.push(found),
                None => missing.push(index),
            }
        }
        if let Some(&missing) = missing.first() {
            let (found, expected) = (shards.len(), self.plan.shards().len());
            return Err(CacheError::Unfinished { dir: self.dir, found, expected, missing });
        }
        publish_shards(&self.dir, self.plan, &self.recipe, shards)
    }

    /// Writes the build's identity into the worker's folder. If the folder has one already,
    /// compares the two.
    fn write_or_check_claim(&self) -> Result<(), CacheError> {
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

/// A finished shard and the worker's folder with its sidecar.
pub(crate) type FinishedShard = (PathBuf, ShardMeta);

/// Returns the sidecar of a finished shard and the first of `parts` that has it.
pub(crate) fn find_finished_shard(
    dir: &Path,
    parts: &[PathBuf],
    plan: &Plan,
    shard: usize,
) -> Result<Option<FinishedShard>, CacheError> {
    for part in parts {
        if let Some(sidecar) = ShardMeta::read_finished(dir, part, plan, shard)? {
            return Ok(Some((part.clone(), sidecar)));
        }
    }
    Ok(None)
}

/// Publishes finished shards as a cache. Moves them into the cache's folder, then writes the
/// samples' table, and the manifest last. Can be repeated after a kill at any point.
pub(crate) fn publish_shards(
    dir: &Path,
    plan: &Plan,
    recipe: &Recipe,
    shards: Vec<FinishedShard>,
) -> Result<Manifest, CacheError> {
    for (index, (part, _)) in shards.iter().enumerate() {
        let (from, to) = (shard::path(part, index), shard::path(dir, index));
        match fs::rename(&from, &to) {
            Err(error) if !is_not_found(&error) => {
                return Err(FileError::at("publishing", &from)(error).into());
            }
            _ => {} // An interrupted publication has moved it already.
        }
    }
    let written: Vec<WrittenSample> =
        shards.iter().flat_map(|(_, sidecar)| sidecar.written_samples()).collect();
    let entry = samples::write_table(dir, plan, &written)?;
    // All file names must be on disk before the manifest refers to them.
    sync_dir(dir)?;
    let shards = shards.into_iter().map(|(_, sidecar)| sidecar.shard).collect();
    let parts = worker_dirs(dir)?;
    let mut manifest = Manifest::new(recipe, entry, shards);
    manifest.origin = read_origins(&parts);
    manifest.no_last_token_states = lack_last_token(&parts);
    manifest.update_digest();
    manifest.write(dir)?;
    sync_dir(dir)?;
    remove_if_present(&parts_dir(dir))?;
    Ok(manifest)
}

/// Syncs `dir`, so that renames within it survive a machine crash.
fn sync_dir(dir: &Path) -> Result<(), CacheError> {
    let sync = || -> io::Result<()> { File::open(dir)?.sync_all() };
    Ok(sync().map_err(FileError::at("syncing", dir))?)
}
