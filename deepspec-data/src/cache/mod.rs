//! `cache`: builds, checks and shows the target's hidden states on disk.

mod build;
mod command;
mod inspect;
mod merge;
mod multi_process;
mod plan;
mod reference;
mod verify;

pub use command::{Command, run};

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use deepspec_capture::cache::CacheError;
use deepspec_core::cli::{UsageError, Verbosity};
use deepspec_core::progress::Progress;
use deepspec_core::{env, jsonl, usage};
use deepspec_drafters::Recipe;

/// Arguments that `cache plan` and `cache build` share.
#[derive(clap::Args)]
struct Job {
    /// Recipe of the run; its target and data decide the states
    #[arg(long, value_name = "C")]
    config: PathBuf,
    /// Override a value of the recipe, as in data.max_length=2048
    #[arg(long, value_name = "K=V")]
    set: Vec<String>,
    /// JSONL rows of conversations, plain, .gz or .zst
    #[arg(long, required = true, num_args = 1.., value_name = "F")]
    input: Vec<PathBuf>,
    /// Folder of the cache, by default the recipe's; rejected lines go beside it, to D.rejected.jsonl
    #[arg(long, value_name = "D")]
    output_dir: Option<PathBuf>,
    /// Hidden states per shard file, in MiB; a build resumes at the first unfinished shard
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    shard_size: u32,
    /// Where the target runs: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: String,
}

impl Job {
    /// The recipe, and the cache folder.
    fn open(&self) -> anyhow::Result<(Recipe, PathBuf)> {
        if let Some(missing) = self.input.iter().find(|input| !input.is_file()) {
            usage!("--input {}: no such file", missing.display());
        }
        if let Some(problem) = self.input.iter().find_map(|input| jsonl::check_is_json_lines(input).err()) {
            usage!("--input {problem}");
        }
        if self.shard_size == 0 {
            usage!("--shard-size must be at least 1");
        }
        let recipe = deepspec_drafters::load_recipe(&self.config, &self.set)?;
        let answers = recipe.data.states.answers.as_deref().map(env::expand_home);
        if let Some(missing) = answers.filter(|answers| !answers.is_dir()) {
            usage!("data.states: answers: {}: no such folder", missing.display());
        }
        let Some(dir) = self.output_dir.clone().or_else(|| recipe.cache_dir()) else {
            usage!("--output-dir is missing, and {} names no cache (data.states)", self.config.display());
        };
        if dir.exists() && !dir.is_dir() {
            usage!("--output-dir {} is a file", dir.display());
        }
        if dir.file_name().is_none() {
            usage!("--output-dir {} names no folder", dir.display());
        }
        Ok((recipe, dir))
    }

    fn shard_bytes(&self) -> u64 {
        u64::from(self.shard_size) << 20
    }
}

/// The cache to look at, given with or without its flag.
#[derive(clap::Args)]
struct CacheDirArgs {
    /// Folder of the cache
    #[arg(value_name = "D", required_unless_present = "cache_dir")]
    dir: Option<PathBuf>,
    /// Folder of the cache, as a flag
    #[arg(long, value_name = "D", conflicts_with = "dir")]
    cache_dir: Option<PathBuf>,
}

impl CacheDirArgs {
    /// The cache folder, which must exist.
    fn dir(&self) -> anyhow::Result<&Path> {
        match self.dir.as_deref().or(self.cache_dir.as_deref()) {
            Some(dir) if dir.is_dir() => Ok(dir),
            Some(dir) => usage!("{}: no such folder", dir.display()),
            None => usage!("no cache was given"),
        }
    }
}

/// Converts an error of the cache: conflicts with an existing build are usage errors.
fn to_usage_error(error: CacheError) -> anyhow::Error {
    match error {
        CacheError::BuildDiffers { .. } | CacheError::Leftover { .. } => UsageError(error.to_string()).into(),
        error => error.into(),
    }
}

/// Bytes as text in MiB.
pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Bytes per unit of progress.
const BYTES_PER_MIB: u64 = 1 << 20;

/// Progress in MiB, updated in bytes by any number of threads.
struct ByteProgress(Mutex<(u64, Progress)>);

impl ByteProgress {
    fn new(verbosity: Verbosity, total: u64) -> Self {
        Self(Mutex::new((0, Progress::new(verbosity, "MiB", total.div_ceil(BYTES_PER_MIB), 0))))
    }

    fn add(&self, bytes: u64) {
        let (read, progress) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let units = (*read + bytes) / BYTES_PER_MIB - *read / BYTES_PER_MIB;
        *read += bytes;
        progress.add(units, String::new);
    }

    fn finish(self) {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner).1.finish();
    }
}
