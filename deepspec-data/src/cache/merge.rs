//! `cache merge`: publishes the shards of several workers as one cache.

use std::io::{self, Write};
use std::path::PathBuf;

use deepspec_capture::cache::merge;
use deepspec_core::cli::{self, Verbosity};
use deepspec_core::usage;

use super::build::describe_cache;
use super::{ByteProgress, mib};

/// Where the workers built.
#[derive(clap::Args)]
pub struct Args {
    /// Folder that the workers were given
    #[arg(long, value_name = "D")]
    output_dir: PathBuf,
}

/// Runs the command.
///
/// # Errors
/// Exits with code 1 if workers have not finished or differ in their plan, or if their shards
/// changed.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    let dir = &args.output_dir;
    if !dir.is_dir() {
        usage!("--output-dir {}: no such folder", dir.display());
    }
    let built = shard_bytes(dir)?;
    tracing::info!("checking {} of finished shards", mib(built));
    let progress = ByteProgress::new(verbosity, built);
    let manifest = merge(dir, |bytes| progress.add(bytes))?;
    progress.finish();
    Ok(writeln!(cli::stdout(), "{}: {}", dir.display(), describe_cache(&manifest))?)
}

/// Bytes of all shards in the folder and the workers' folders.
fn shard_bytes(dir: &std::path::Path) -> io::Result<u64> {
    let mut bytes = 0;
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let (path, metadata) = (entry.path(), entry.metadata()?);
            if metadata.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "safetensors") {
                bytes += metadata.len();
            }
        }
    }
    Ok(bytes)
}
