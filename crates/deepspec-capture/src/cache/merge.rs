//! Merges the shards of several workers into one cache.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use deepspec_core::atomic::FileError;
use deepspec_core::digest::Hasher;
use rayon::prelude::*;

use crate::cache::builder::{FinishedShard, find_finished_shard, publish_shards};
use crate::cache::error::CacheError;
use crate::cache::files::parts_dir;
use crate::cache::identity::Recipe;
use crate::cache::layout::Layout;
use crate::cache::manifest::Manifest;
use crate::cache::parts::{Claim, Worker, lock_worker_dir, remove_if_present, worker_dirs};
use crate::cache::plan::Plan;
use crate::cache::sample::PlannedSample;
use crate::cache::shard;
use crate::cache::writer::ShardMeta;

/// Bytes hashed between two progress reports.
const PROGRESS_STEP_BYTES: usize = 1 << 20;

/// Publishes the shards of all workers in `dir`. First checks that they belong to one build, that
/// every sample of its plan occurs once, and that no shard was changed. Does nothing if all is
/// published. A later merge resumes one that was killed.
///
/// `progress` is called from several threads with the number of shard bytes just checked.
///
/// # Errors
/// Fails if nothing was built there, or if shards are damaged. Names workers that are running,
/// unfinished or built something else. Also fails on I/O failures.
pub fn merge(dir: &Path, progress: impl Fn(u64) + Sync) -> Result<Manifest, CacheError> {
    let parts = worker_dirs(dir)?;
    let published = Manifest::read_if_present(dir)?;
    if parts.is_empty() {
        return published.ok_or_else(|| CacheError::NoParts { dir: dir.to_path_buf() });
    }
    let _locks: Vec<File> = parts.iter().map(|part| lock_worker_dir(part)).collect::<Result<_, _>>()?;
    let (parts, claim) = read_claims(dir, parts)?;
    if let Some(manifest) = published {
        let differences = claim.build.differences(&manifest.recipe());
        if !differences.is_empty() {
            return Err(CacheError::PartDiffers { part: parts_dir(dir), differences });
        }
        remove_if_present(&parts_dir(dir))?;
        return Ok(manifest);
    }
    let plan = reconstruct_plan(dir, &parts, &claim)?;
    let mut shards = Vec::with_capacity(claim.shards);
    for index in 0..claim.shards {
        shards.push(
            find_finished_shard(dir, &parts, &plan, index)?
                .ok_or_else(|| incomplete_error(dir, &claim, &[index]))?,
        );
    }
    shards
        .par_iter()
        .enumerate()
        .try_for_each(|(index, found)| check_shard_digest(dir, index, found, &progress))?;
    publish_shards(dir, &plan, &claim.build, shards)
}

/// Returns the folders of workers that have started, and the build that they share.
fn read_claims(dir: &Path, parts: Vec<PathBuf>) -> Result<(Vec<PathBuf>, Claim), CacheError> {
    let mut common: Option<Claim> = None;
    let mut begun = Vec::with_capacity(parts.len());
    for part in parts {
        let Some(claim) = Claim::read(&part)? else { continue };
        if let Some(first) = &mut common {
            let mut differences = claim.build.differences(&first.build);
            if claim.shards != first.shards {
                differences.push(format!("shards is {} there, {} is wanted", claim.shards, first.shards));
            }
            if !differences.is_empty() {
                return Err(CacheError::PartDiffers { part, differences });
            }
            first.workers = first.workers.max(claim.workers);
        } else {
            common = Some(claim);
        }
        begun.push(part);
    }
    common.map(|claim| (begun, claim)).ok_or_else(|| CacheError::NoParts { dir: dir.to_path_buf() })
}

/// Reconstructs the plan from the lists of samples beside the shards.
fn reconstruct_plan(dir: &Path, parts: &[PathBuf], claim: &Claim) -> Result<Plan, CacheError> {
    let listed = |index: usize| {
        let vouched = |part: &&PathBuf| {
            ShardMeta::path(part, index).exists() && ShardMeta::shard_samples_path(part, index).exists()
        };
        parts.iter().find(vouched).map(|part| ShardMeta::shard_samples_path(part, index))
    };
    let lists: Vec<Option<PathBuf>> = (0..claim.shards).map(listed).collect();
    let missing: Vec<usize> = (0..claim.shards).filter(|&index| lists[index].is_none()).collect();
    if !missing.is_empty() {
        return Err(incomplete_error(dir, claim, &missing));
    }
    let mut samples = Vec::new();
    for path in lists.into_iter().flatten() {
        let file = File::open(&path).map_err(FileError::at("opening", &path))?;
        for line in BufReader::new(file).lines() {
            let line = line.map_err(FileError::at("reading", &path))?;
            let sample: PlannedSample = serde_json::from_str(&line)
                .map_err(|source| CacheError::Json { path: path.clone(), source })?;
            samples.push(sample);
        }
    }
    let Recipe { identity, encoding, last, shard_bytes, .. } = &claim.build;
    let layout = Layout {
        taps: identity.taps.clone(),
        hidden_size: identity.hidden_size,
        last: *last,
        encoding: *encoding,
    };
    let plan = Plan::new(samples, layout, *shard_bytes)?;
    // The digest over all samples in order proves that each occurs once and is unchanged.
    let differences = plan.recipe(identity)?.differences(&claim.build);
    if !differences.is_empty() || plan.shards().len() != claim.shards {
        return Err(CacheError::PartDiffers { part: parts_dir(dir), differences });
    }
    Ok(plan)
}

fn incomplete_error(dir: &Path, claim: &Claim, missing: &[usize]) -> CacheError {
    let lacks = |worker: &Worker| missing.iter().any(|&shard| worker.builds(shard));
    let workers = (0..claim.workers).filter_map(|index| Worker::new(index, claim.workers)).filter(lacks);
    CacheError::Incomplete {
        dir: dir.to_path_buf(),
        missing: missing.len(),
        expected: claim.shards,
        workers: workers.map(|worker| worker.to_string()).collect(),
    }
}

fn check_shard_digest(
    dir: &Path,
    index: usize,
    (part, sidecar): &FinishedShard,
    progress: &(impl Fn(u64) + Sync),
) -> Result<(), CacheError> {
    let [own, moved] = [part, dir].map(|dir| shard::path(dir, index));
    let path = if own.exists() { own } else { moved };
    let mut hasher = Hasher::default();
    let mut hash = || -> io::Result<()> {
        let (mut file, mut buffer) = (File::open(&path)?, vec![0; PROGRESS_STEP_BYTES]);
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(()),
                read => {
                    hasher.update_raw(&buffer[..read]);
                    progress(read as u64);
                }
            }
        }
    };
    hash().map_err(FileError::at("reading", &path))?;
    let (found, expected) = (hasher.hex_digest(), sidecar.shard.sha256.clone());
    match found == expected {
        true => Ok(()),
        false => Err(CacheError::PartDamaged { path, found, expected }),
    }
}
