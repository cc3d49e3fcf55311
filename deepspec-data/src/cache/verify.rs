//! `cache verify`: every byte is what was written.

use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use deepspec_cache::{Manifest, verify};
use deepspec_core::cli::{ExitWith, Verbosity};
use deepspec_core::progress::Progress;

use super::{Place, mib};

/// Bytes per unit of progress.
const UNIT: u64 = 1 << 20;

/// Which cache to check.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    place: Place,
}

/// Runs the command.
///
/// # Errors
/// Exit code 1 if anything is wrong, after all of it is printed.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    let dir = args.place.dir()?;
    let manifest = Manifest::read(dir)?;
    let (total, read) = (manifest.bytes(), Mutex::new(0));
    let progress = Mutex::new(Progress::new(verbosity, "MiB", total.div_ceil(UNIT), 0));
    let problems = verify(dir, |bytes| {
        let mut read = read.lock().unwrap_or_else(PoisonError::into_inner);
        let units = (*read + bytes) / UNIT - *read / UNIT;
        *read += bytes;
        progress.lock().unwrap_or_else(PoisonError::into_inner).add(units, String::new);
    })?;
    progress.into_inner().unwrap_or_else(PoisonError::into_inner).finish();
    for problem in &problems {
        writeln!(io::stdout(), "{problem}")?;
    }
    if !problems.is_empty() {
        let reason = format!("{} is damaged: {} problems", dir.display(), problems.len());
        return Err(ExitWith { code: 1, reason }.into());
    }
    let (samples, shards) = (manifest.counts.samples, manifest.shards.len());
    writeln!(io::stdout(), "{}: sound; {samples} samples in {shards} shards, {}", dir.display(), mib(total))?;
    Ok(())
}
