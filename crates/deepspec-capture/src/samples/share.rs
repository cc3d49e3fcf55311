//! Tokenises in one process. Other processes wait for it and map its file, as later runs do.

use std::fs::{self, File, Metadata, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use deepspec_core::atomic::{FileError, create_dir};

use super::writer::SamplesWriter;
use super::{Samples, SamplesIdentity, SamplesOpenError};
use crate::rows::for_each_sample;
use crate::{StatesError, TargetSpec};

/// Suffix of a file that is being written.
const PARTIAL_SUFFIX: &str = ".partial";
/// A partial file without writes for this long is abandoned, on whichever machine its writer ran.
const ABANDONED_AFTER: Duration = Duration::from_secs(24 * 3600);

/// Returns the samples of `inputs`, tokenised for `source`, from a file in `dir`. If the file does
/// not exist, this process or another writes it. `dir` may be on a file system shared by machines,
/// with or without locks.
pub(crate) fn open_or_tokenise(
    dir: &Path,
    inputs: &[PathBuf],
    source: &TargetSpec,
) -> Result<Samples, StatesError> {
    let stamps = file_stamps(inputs)?;
    let identity = SamplesIdentity::from_files(inputs, source)?;
    let name = identity.file_stem();
    let path = dir.join(format!("{name}.samples"));
    match Samples::open(&path, &identity, inputs) {
        Ok(samples) => return Ok(log_samples_path(samples)),
        Err(SamplesOpenError::Unreadable(error)) => return Err(error),
        Err(SamplesOpenError::Absent | SamplesOpenError::Damaged(_)) => {}
    }
    create_dir(dir).map_err(StatesError::Unwritable)?;
    let lock =
        lock_samples_file(&dir.join(format!("{name}.lock")), &path).map_err(StatesError::Unwritable)?;
    match Samples::open(&path, &identity, inputs) {
        Ok(samples) => return Ok(log_samples_path(samples)),
        Err(SamplesOpenError::Absent) => {}
        Err(SamplesOpenError::Unreadable(error)) => return Err(error),
        Err(SamplesOpenError::Damaged(problem)) => {
            tracing::warn!("{}: {problem}; tokenising once more", path.display());
            fs::remove_file(&path)
                .map_err(FileError::at("removing", &path))
                .map_err(StatesError::Unwritable)?;
        }
    }
    let own = format!("{name}.{}.", boot_id());
    if lock.is_some() {
        remove_abandoned_files(dir, &name, &own);
    }
    let begun = Instant::now();
    let mut writer = SamplesWriter::create(|tries| {
        dir.join(format!("{own}{}-{tries}{PARTIAL_SUFFIX}", std::process::id()))
    })?;
    let report = for_each_sample(inputs, source, |_| (), |sample| writer.push(&sample))?;
    if stamps != self::file_stamps(inputs)? {
        let problem = "a file was written to while it was read; wait until it is complete".into();
        return Err(StatesError::Recipe { key: "data.input", problem });
    }
    writer.publish(&path, identity.clone(), &report, inputs)?;
    let seconds = begun.elapsed().as_secs_f64();
    tracing::info!("tokenised {} rows in {seconds:.1} s into {}", report.read, path.display());
    Samples::open(&path, &identity, inputs).map_err(|unusable| match unusable {
        SamplesOpenError::Unreadable(error) => error,
        SamplesOpenError::Absent => {
            StatesError::Samples { path, problem: "it vanished while it was written".into() }
        }
        SamplesOpenError::Damaged(problem) => StatesError::Samples { path, problem },
    })
}

fn log_samples_path(samples: Samples) -> Samples {
    tracing::info!("tokenised rows from {}", samples.path().display());
    samples
}

/// Locks `path` against other processes until the lock is dropped; `None` if the file system has no
/// locks. Then several processes may tokenise, and the first to finish publishes.
fn lock_samples_file(lock: &Path, path: &Path) -> Result<Option<File>, FileError> {
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

/// Removes partial files of killed writers. The lock proves that those of this machine are
/// abandoned; those of other machines are if they are old.
fn remove_abandoned_files(dir: &Path, name: &str, own: &str) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let file = entry.file_name();
        let file = file.to_string_lossy();
        if !(file.starts_with(name) && file.ends_with(PARTIAL_SUFFIX)) {
            continue;
        }
        let changed = entry.metadata().and_then(|metadata| metadata.modified());
        let idle = changed.ok().and_then(|changed| SystemTime::now().duration_since(changed).ok());
        if (file.starts_with(own) || idle.is_some_and(|idle| idle > ABANDONED_AFTER))
            && let Err(error) = fs::remove_file(entry.path())
        {
            tracing::warn!("{}: left over and not removed: {error}", entry.path().display());
        }
    }
}

/// An id of this machine's current boot. Locks are only valid within it if machines share files but
/// not locks.
fn boot_id() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let id: String = id.chars().filter(char::is_ascii_alphanumeric).take(12).collect();
    if id.is_empty() { "unknown".into() } else { id }
}

/// Sizes and modification times of files. A difference reveals that a file changed during the run.
fn file_stamps(inputs: &[PathBuf]) -> Result<Vec<(u64, Option<SystemTime>)>, FileError> {
    let stamp = |metadata: Metadata| (metadata.len(), metadata.modified().ok());
    let of = |path: &PathBuf| fs::metadata(path).map(stamp).map_err(FileError::at("reading", path));
    inputs.iter().map(of).collect()
}
