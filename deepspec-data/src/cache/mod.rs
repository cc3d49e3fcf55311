//! `cache`: the target's hidden states on disk, built, checked and looked at.

mod build;
mod inspect;
mod verify;

use std::path::{Path, PathBuf};

use deepspec_cache::CacheError;
use deepspec_core::cli::{UsageError, Verbosity};
use deepspec_core::usage;

/// What to do with a cache.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Run the target over conversations and keep its hidden states; the same command resumes after a kill
    Build(build::Args),
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
fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
