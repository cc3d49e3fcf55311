//! One process tokenises; the others wait for it and map what it wrote, as later runs do.

use std::fs::{self, File, Metadata, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use deepspec_core::atomic::{FileError, create_dir};

use super::writer::Writer;
use super::{Samples, SamplesIdentity, Unusable};
use crate::rows::for_each_sample;
use crate::{StatesError, TargetSpec};

/// What ends the name of a file that is still being written.
const PARTIAL: &str = ".partial";
/// A partial file that was not written to for so long has no writer any more, whichever machine that ran on.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);

/// The samples of `inputs` as `source` tokenises them, from a file in `dir`: the one that is there, else one that is written now, by this
/// process or another. `dir` may be on a file system that machines share, with locks or without.
pub(crate) fn shared(dir: &Path, inputs: &[PathBuf], source: &TargetSpec) -> Result<Samples, StatesError> {
    let stamps = stamps(inputs)?;
    let identity = SamplesIdentity::of(inputs, source)?;
    let name = identity.name();
    let path = dir.join(format!("{name}.samples"));
    match Samples::open(&path, &identity, inputs) {
        Ok(samples) => return Ok(told(samples)),
        Err(Unusable::Unreadable(error)) => return Err(error),
        Err(Unusable::Absent | Unusable::Damaged(_)) => {}
    }
    create_dir(dir).map_err(StatesError::Unwritable)?;
    let lock = lock(&dir.join(format!("{name}.lock")), &path).map_err(StatesError::Unwritable)?;
    match Samples::open(&path, &identity, inputs) {
        Ok(samples) => return Ok(told(samples)),
        Err(Unusable::Absent) => {}
        Err(Unusable::Unreadable(error)) => return Err(error),
        Err(Unusable::Damaged(problem)) => {
            tracing::warn!("{}: {problem}; tokenising once more", path.display());
            fs::remove_file(&path)
                .map_err(FileError::at("removing", &path))
                .map_err(StatesError::Unwritable)?;
        }
    }
    let own = format!("{name}.{}.", boot());
    if lock.is_some() {
        sweep(dir, &name, &own);
    }
    let begun = Instant::now();
    let mut writer =
        Writer::begin(|tries| dir.join(format!("{own}{}-{tries}{PARTIAL}", std::process::id())))?;
    let report = for_each_sample(inputs, source, |_| (), |sample| writer.push(&sample))?;
    if stamps != self::stamps(inputs)? {
        let problem = "a file was written to while it was read; wait until it is complete".into();
        return Err(StatesError::Recipe { key: "data.input", problem });
    }
    writer.publish(&path, identity.clone(), &report, inputs)?;
    let seconds = begun.elapsed().as_secs_f64();
    tracing::info!("tokenised {} rows in {seconds:.1} s into {}", report.read, path.display());
    Samples::open(&path, &identity, inputs).map_err(|unusable| match unusable {
        Unusable::Unreadable(error) => error,
        Unusable::Absent => StatesError::Samples { path, problem: "it vanished while it was written".into() },
        Unusable::Damaged(problem) => StatesError::Samples { path, problem },
    })
}

fn told(samples: Samples) -> Samples {
    tracing::info!("tokenised rows from {}", samples.path().display());
    samples
}

/// Keeps other processes from writing `path` until it is dropped; `None` where the file system has no locks. There several may tokenise at
/// once; the first that is done publishes.
fn lock(lock: &Path, path: &Path) -> Result<Option<File>, FileError> {
    let open = || -> io::Result<Option<File>> {
        let file = File::options().create(true).truncate(false).write(true).open(lock)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => {
                tracing::info!("waiting for another process, which tokenises into {}", path.display());
                file.lock()?;
                Ok(Some(file))
            }
            Err(TryLockError::Error(error)) => {
                tracing::warn!(
                    "{}: no locks here ({error}); other processes may tokenise too",
                    lock.display()
                );
                Ok(None)
            }
        }
    };
    open().map_err(FileError::at("locking", lock))
}

/// Removes what writers that were killed have left: those of this machine, which the lock rules out, and old ones of any.
fn sweep(dir: &Path, name: &str, own: &str) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let file = entry.file_name();
        let file = file.to_string_lossy();
        if !(file.starts_with(name) && file.ends_with(PARTIAL)) {
            continue;
        }
        let changed = entry.metadata().and_then(|metadata| metadata.modified());
        let idle = changed.ok().and_then(|changed| SystemTime::now().duration_since(changed).ok());
        if (file.starts_with(own) || idle.is_some_and(|idle| idle > ABANDONED))
            && let Err(error) = fs::remove_file(entry.path())
        {
            tracing::warn!("{}: left over and not removed: {error}", entry.path().display());
        }
    }
}

/// Tells machines apart, and a machine's lives: the reach of a lock where machines share files but not locks.
fn boot() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let id: String = id.chars().filter(char::is_ascii_alphanumeric).take(12).collect();
    if id.is_empty() { "unknown".into() } else { id }
}

/// Sizes and times of change, by which a file that changes under our hands is found out.
fn stamps(inputs: &[PathBuf]) -> Result<Vec<(u64, Option<SystemTime>)>, FileError> {
    let stamp = |metadata: Metadata| (metadata.len(), metadata.modified().ok());
    let of = |path: &PathBuf| fs::metadata(path).map(stamp).map_err(FileError::at("reading", path));
    inputs.iter().map(of).collect()
}
