//! `checkpoint convert`.

use std::path::PathBuf;

use deepspec_core::cli::Verbosity;
use deepspec_core::usage;
use deepspec_dialects::{Checkpoint, Dialect, Target, convert};

use super::{dir, report};

/// What to convert, and to what.
#[derive(clap::Args)]
pub struct Args {
    /// Folder or hub id of the drafter checkpoint
    #[arg(long, value_name = "D")]
    from: String,
    /// Layout to write: reference, speculators, specforge, z-lab or modelopt
    #[arg(long, value_name = "DIALECT")]
    to: Dialect,
    /// Folder to write
    #[arg(long, value_name = "D")]
    output_dir: PathBuf,
    /// Folder or hub id of the target, where embedding, head and final norm are taken from and compared with
    #[arg(long, value_name = "M")]
    target: Option<String>,
    /// Replace a converted checkpoint that exists
    #[arg(long)]
    overwrite: bool,
}

/// Runs the command.
///
/// # Errors
/// Usage errors and refusals, broken checkpoints, unwritable outputs.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    if args.output_dir.exists() && !args.overwrite {
        usage!("{} exists already; --overwrite replaces it", args.output_dir.display());
    }
    let from = dir("--from", &args.from, verbosity)?;
    let source = Checkpoint::open(&from).map_err(report)?;
    let target = match &args.target {
        Some(name) => Some(Target::open(&dir("--target", name, verbosity)?, name).map_err(report)?),
        None => None,
    };
    let converted = convert(&source, args.to, target.as_ref()).map_err(report)?;
    let told = |what: &str, names: &[String]| {
        if !names.is_empty() {
            tracing::info!("{what}: {}", names.join(", "));
        }
    };
    told("taken from the target", &converted.taken);
    told("left to the target", &converted.dropped);
    converted.write(&args.output_dir, args.overwrite).map_err(report)?;
    let (algorithm, from, to) = (source.drafter().kind.title(), source.dialect(), args.to);
    tracing::info!("{algorithm} converted from {from} to {to}: {}", args.output_dir.display());
    Ok(())
}
