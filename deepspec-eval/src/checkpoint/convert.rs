//! `checkpoint convert`.

use std::path::PathBuf;
use std::str::FromStr;

use deepspec_core::cli::Verbosity;
use deepspec_core::{atomic, usage};
use deepspec_dialects::{Checkpoint, Dialect, Gguf, Target, TensorType, convert};

use super::{dir, report};

/// What to convert, and to what.
#[derive(clap::Args)]
pub struct Args {
    /// Folder or hub id of the drafter checkpoint
    #[arg(long, value_name = "D")]
    from: String,
    /// Layout to write: reference, speculators, specforge, z-lab or modelopt; or gguf, the file that llama.cpp loads
    #[arg(long, value_name = "LAYOUT")]
    to: Layout,
    /// Folder to write; of gguf the file model.gguf in it
    #[arg(long, value_name = "D")]
    output_dir: PathBuf,
    /// With --to gguf, the type of matrices: f32, f16 or bf16; by default as they are stored
    #[arg(long, value_name = "TYPE")]
    matrices: Option<TensorType>,
    /// Folder or hub id of the target, where embedding and head are taken from and compared with
    #[arg(long, value_name = "M")]
    target: Option<String>,
    /// Replace a converted checkpoint that exists
    #[arg(long)]
    overwrite: bool,
}

/// What is written.
#[derive(Debug, Clone, Copy)]
enum Layout {
    Dialect(Dialect),
    Gguf,
}

impl FromStr for Layout {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "gguf" => Ok(Self::Gguf),
            name => name.parse().map(Self::Dialect).map_err(|error| format!("{error} or gguf")),
        }
    }
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
    let to = match args.to {
        Layout::Dialect(to) => to,
        Layout::Gguf => return to_gguf(args, &source, target.as_ref()),
    };
    if args.matrices.is_some() {
        usage!("--matrices is for --to gguf; {to} keeps every byte");
    }
    let converted = convert(&source, to, target.as_ref()).map_err(report)?;
    let told = |what: &str, names: &[String]| {
        if !names.is_empty() {
            tracing::info!("{what}: {}", names.join(", "));
        }
    };
    told("taken from the target", &converted.taken);
    told("left to the target", &converted.dropped);
    converted.write(&args.output_dir, args.overwrite).map_err(report)?;
    let (algorithm, from) = (source.drafter().kind.title(), source.dialect());
    tracing::info!("{algorithm} converted from {from} to {to}: {}", args.output_dir.display());
    Ok(())
}

fn to_gguf(args: &Args, source: &Checkpoint, target: Option<&Target>) -> anyhow::Result<()> {
    let Some(target) = target else {
        usage!(
            "--to gguf needs --target, whose tokenizer it holds and whose embedding and head llama.cpp will use"
        );
    };
    let gguf = Gguf::plan(source, target, args.matrices).map_err(report)?;
    let file = args.output_dir.join("model.gguf");
    atomic::create_dir(&args.output_dir)?;
    gguf.write(&file).map_err(report)?;
    if !gguf.splits_as_known {
        tracing::info!(
            "llama.cpp has no name for how the target's tokenizer splits texts; that matters to the target's own file, not to this one"
        );
    }
    let (kind, from) = (source.drafter().kind.title(), source.dialect());
    tracing::info!(
        "{kind} converted from {from} to gguf: {}; serve it by llama-server --model TARGET.gguf --model-draft {} --spec-type {} \
         --spec-draft-n-max {}",
        file.display(),
        file.display(),
        gguf.spec_type,
        source.drafter().kind.drafted()
    );
    Ok(())
}
