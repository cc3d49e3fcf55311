//! `cache verify`: checks every byte of a cache.

use std::io::Write;

use deepspec_capture::cache::{Manifest, verify};
use deepspec_core::cli::{self, ExitWith, Verbosity, count};

use super::{ByteProgress, CacheDirArgs, mib};

/// Which cache to check.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    place: CacheDirArgs,
}

/// Runs the command.
///
/// # Errors
/// Exits with code 1 after printing all problems, if there are any.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    let dir = args.place.dir()?;
    let manifest = Manifest::read(dir)?;
    let total = manifest.bytes();
    let progress = ByteProgress::new(verbosity, total);
    let problems = verify(dir, |bytes| progress.add(bytes))?;
    progress.finish();
    for problem in &problems {
        writeln!(cli::stdout(), "{problem}")?;
    }
    if !problems.is_empty() {
        let reason = format!("{} is damaged: {} problems", dir.display(), problems.len());
        return Err(ExitWith { code: 1, reason }.into());
    }
    let (samples, shards) = (manifest.counts.samples, manifest.shards.len());
    writeln!(
        cli::stdout(),
        "{}: sound; {} in {}, {}",
        dir.display(),
        count(samples as usize, "sample"),
        count(shards, "shard"),
        mib(total)
    )?;
    Ok(())
}
