//! `cache`: the target's hidden states on disk, built, checked and looked at.

mod build;
mod inspect;
mod merge;
mod plan;
mod reference;
mod verify;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use deepspec_cache::CacheError;
use deepspec_core::cli::{UsageError, Verbosity};
use deepspec_core::progress::Progress;
use deepspec_core::usage;

/// What to do with a cache.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Say what a build would write and how long it would take, before anything runs
    Plan(plan::Args),
    /// Run the target over conversations and keep its hidden states; the same command resumes after a kill
    Build(build::Args),
    /// Publish what the workers of a build have finished, after checking that all of it is there
    Merge(merge::Args),
    /// Take over a target cache of the reference's format 2
    Import(reference::ImportArgs),
    /// Write a cache in the reference's format 2; needs bf16 and all last states
    Export(reference::ExportArgs),
    /// Check every byte of a cache
    Verify(verify::Args),
    /// Say what a cache holds, or what one sample looks like
    Inspect(inspect::Args),
}

/// Runs the command.
///
/// # Errors
/// Usage errors; exit code 1 if rows were rejected or a cache is damaged.
pub fn run(command: &Command, verbosity: Verbosity) -> anyhow::Result<()> {
    match command {
        Command::Build(args) => build::run(args, verbosity),
        Command::Plan(args) => plan::run(args, verbosity),
        Command::Merge(args) => merge::run(args, verbosity),
        Command::Import(args) => reference::import(args, verbosity),
        Command::Export(args) => reference::export(args, verbosity),
        Command::Verify(args) => verify::run(args, verbosity),
        Command::Inspect(args) => inspect::run(args),
    }
}

/// The cache to look at, given with or without its flag.
#[derive(clap::Args)]
struct Place {
    /// Folder of the cache
    #[arg(value_name = "D", required_unless_present = "cache_dir")]
    dir: Option<PathBuf>,
    /// The same, as a flag
    #[arg(long, value_name = "D", conflicts_with = "dir")]
    cache_dir: Option<PathBuf>,
}

impl Place {
    /// The folder, which must be there.
    fn dir(&self) -> anyhow::Result<&Path> {
        match self.dir.as_deref().or(self.cache_dir.as_deref()) {
            Some(dir) if dir.is_dir() => Ok(dir),
            Some(dir) => usage!("{}: no such folder", dir.display()),
            None => usage!("no cache was given"),
        }
    }
}

/// Sorts a cache's complaint: what stands in the way by the caller's choice is a usage error.
fn refusal(error: CacheError) -> anyhow::Error {
    match error {
        CacheError::BuildDiffers { .. } | CacheError::Leftover { .. } => UsageError(error.to_string()).into(),
        error => error.into(),
    }
}

/// Bytes for people.
pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Bytes per unit of progress.
const UNIT: u64 = 1 << 20;

/// Progress in MiB, fed with bytes from any number of threads.
struct ByteProgress(Mutex<(u64, Progress)>);

impl ByteProgress {
    fn new(verbosity: Verbosity, total: u64) -> Self {
        Self(Mutex::new((0, Progress::new(verbosity, "MiB", total.div_ceil(UNIT), 0))))
    }

    fn add(&self, bytes: u64) {
        let (read, progress) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let units = (*read + bytes) / UNIT - *read / UNIT;
        *read += bytes;
        progress.add(units, String::new);
    }

    fn finish(self) {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner).1.finish();
    }
}
