//! Builds a cache shard by shard, resumes after a kill, publishes at the end.
//!
//! While it is built, a cache is the folder `parts/worker-NNN/` with `build.json` (what is being built), finished shards
//! with a sidecar each, and at most one `.partial` per running writer. Publishing moves the shards up, then writes the
//! samples' table, then the manifest. A kill between any two of these steps is resumed by the next [`Builder::open`].

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};
use fs4::fs_std::FileExt;

use crate::error::CacheError;
use crate::identity::Identity;
use crate::manifest::{self, Manifest, is_absent};
use crate::plan::{Plan, Recipe};
use crate::samples::{self, SAMPLES_FILE};
use crate::shard;
use crate::writer::{ShardWriter, Sidecar};

/// What a worker's folder says about the build that it belongs to.
const RECIPE_FILE: &str = "build.json";

/// The folder of unfinished builds in `dir`.
pub(crate) fn parts_dir(dir: &Path) -> PathBuf {
    dir.join("parts")
}

/// A build of a plan into a folder.
#[derive(Debug)]
pub struct Builder<'p> {
    dir: PathBuf,
    part: PathBuf,
    plan: &'p Plan,
    recipe: Recipe,
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
        let recipe = plan.recipe(identity)?;
        let part = parts_dir(dir).join("worker-000");
        let mut builder = Self {
            dir: dir.to_path_buf(),
            part,
            plan,
            recipe,
            pending: VecDeque::new(),
            done_samples: 0,
            published: None,
            _lock: None,
        };
        if let Some(manifest) = Manifest::read_if_present(dir)? {
            builder.refuse_differences(&manifest.recipe(), true)?;
            remove_if_present(&parts_dir(dir))?;
            builder.done_samples = plan.samples().len();
            builder.published = Some(manifest);
            return Ok(builder);
        }
        if !builder.part.join(RECIPE_FILE).exists()
            && let Some(path) = leftovers(dir)?.into_iter().next()
        {
            return Err(CacheError::Leftover { path });
        }
        atomic::create_dir(&builder.part)?;
        builder._lock = Some(lock(&builder.part)?);
        builder.claim()?;
        for (index, planned) in plan.shards().iter().enumerate() {
            match Sidecar::of_finished(dir, &builder.part, plan, index)? {
                Some(_) => builder.done_samples += planned.samples.len(),
                None => builder.pending.push_back(index),
            }
        }
        Ok(builder)
    }

    /// Samples in finished shards when the build was opened.
    pub fn done_samples(&self) -> usize {
        self.done_samples
    }

    /// Shards that have yet to be handed out.
    pub fn pending_shards(&self) -> usize {
        self.pending.len()
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
        let mut sidecars = Vec::with_capacity(self.plan.shards().len());
        let mut missing = Vec::new();
        for index in 0..self.plan.shards().len() {
            match Sidecar::of_finished(&self.dir, &self.part, self.plan, index)? {
                Some(sidecar) => sidecars.push(sidecar),
                None => missing.push(index),
            }
        }
        if let Some(&missing) = missing.first() {
            let (found, expected) = (sidecars.len(), self.plan.shards().len());
            return Err(CacheError::Unfinished { dir: self.dir, found, expected, missing });
        }
        for index in 0..sidecars.len() {
            let (from, to) = (shard::path(&self.part, index), shard::path(&self.dir, index));
            match fs::rename(&from, &to) {
                Err(error) if !is_absent(&error) => {
                    return Err(FileError::at("publishing", &from)(error).into());
                }
                _ => {} // An interrupted publication has moved it already.
            }
        }
        let checksums: Vec<u32> =
            sidecars.iter().flat_map(|sidecar| sidecar.checksums.iter().copied()).collect();
        let entry = samples::write(&self.dir, self.plan, &checksums)?;
        // All names must be on disk before the manifest vouches for them.
        sync_dir(&self.dir)?;
        let shards = sidecars.into_iter().map(|sidecar| sidecar.shard).collect();
        let manifest = Manifest::new(&self.recipe, entry, shards);
        manifest.write(&self.dir)?;
        sync_dir(&self.dir)?;
        remove_if_present(&parts_dir(&self.dir))?;
        Ok(manifest)
    }

    /// Writes what is built into the worker's folder, or checks that it says the same.
    fn claim(&self) -> Result<(), CacheError> {
        let path = self.part.join(RECIPE_FILE);
        match fs::read(&path) {
            Ok(bytes) => {
                let there: Recipe =
                    serde_json::from_slice(&bytes).map_err(|source| CacheError::Json { path, source })?;
                self.refuse_differences(&there, false)
            }
            Err(error) if is_absent(&error) => Ok(atomic::write_json(&path, &self.recipe)?),
            Err(error) => Err(FileError::at("reading", &path)(error).into()),
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

/// Removes a cache or an unfinished build from `dir`, for `--overwrite`. Files that are no cache's are left alone.
///
/// The manifest goes first, so that what is left after a kill is not taken for a cache.
///
/// # Errors
/// I/O failures; another process that builds there.
pub fn remove_existing(dir: &Path) -> Result<(), CacheError> {
    let part = parts_dir(dir).join("worker-000");
    let _lock = if part.exists() { Some(lock(&part)?) } else { None };
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
fn lock(part: &Path) -> Result<File, CacheError> {
    let path = part.join("lock");
    let open = || OpenOptions::new().write(true).create(true).truncate(false).open(&path);
    let file = open().map_err(FileError::at("opening", &path))?;
    match file.try_lock_exclusive().map_err(FileError::at("locking", &path))? {
        true => Ok(file),
        false => Err(CacheError::Locked { dir: part.to_path_buf() }),
    }
}

fn remove_if_present(path: &Path) -> Result<(), CacheError> {
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
