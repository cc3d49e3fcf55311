//! `checkpoint convert`.

use std::path::PathBuf;

use deepspec_checkpoint::{
    Checkpoint, Engine, ExportTarget, GgufExport, Target, TensorType, convert, convert_for_engine,
};
use deepspec_core::cli::Verbosity;
use deepspec_core::usage;
use deepspec_drafters::open_checkpoint;
use deepspec_hub::Repo;

use super::{model_folder, report, target_folder};

/// Arguments of `checkpoint convert`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder or hub id of the drafter checkpoint
    #[arg(long, value_name = "D")]
    from: String,
    /// Layout to write. Layouts of tools: reference, speculators, specforge, z-lab, modelopt. Layouts of engines: vllm,
    /// sglang, and gguf, the file that llama.cpp loads
    #[arg(long, value_name = "LAYOUT")]
    to: ExportTarget,
    /// Folder to write; with --to gguf, the file model.gguf in it
    #[arg(long, value_name = "D")]
    output_dir: PathBuf,
    /// With --to gguf, the dtype of the matrices; by default the dtype of the checkpoint
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Folder, GGUF file or hub id of the target, where embedding and head are taken from and compared with
    #[arg(long, value_name = "M")]
    target: Option<String>,
    /// Replace a converted checkpoint that exists
    #[arg(long)]
    overwrite: bool,
}

/// Dtype of the matrices in a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Dtype {
    /// 32-bit floating point.
    Float32,
    /// 16-bit floating point.
    Float16,
    /// Brain floating point.
    Bfloat16,
}

impl From<Dtype> for TensorType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Float32 => Self::F32,
            Dtype::Float16 => Self::F16,
            Dtype::Bfloat16 => Self::Bf16,
        }
    }
}

/// Runs the command.
///
/// # Errors
/// Usage errors, conversions that are refused, broken checkpoints, and outputs that cannot be
/// written.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    let from = model_folder("--from", &args.from, verbosity)?;
    let source = open_checkpoint(&from).map_err(report)?;
    let target = match &args.target {
        Some(name) => Some(Target::open(&target_folder(name, verbosity)?, name).map_err(report)?),
        None => None,
    };
    if args.dtype.is_some() && args.to != ExportTarget::Engine(Engine::LlamaCpp) {
        usage!("--dtype is for --to gguf; the other layouts keep every byte");
    }
    let converted = match (args.to, &target) {
        (ExportTarget::Format(to), target) => convert(&source, to, target.as_ref()),
        (ExportTarget::Engine(Engine::LlamaCpp), _) => {
            return convert_to_gguf(args, &source, target.as_ref());
        }
        (ExportTarget::Engine(_), None) => {
            usage!("--to vllm or sglang needs --target, whose embedding and head the engine will use")
        }
        (ExportTarget::Engine(engine), Some(target)) => convert_for_engine(&source, engine, target),
    };
    let converted = converted.map_err(report)?;
    let told = |what: &str, names: &[String]| {
        if !names.is_empty() {
            tracing::info!("{what}: {}", names.join(", "));
        }
    };
    told("taken from the target", &converted.copied_from_target);
    told("left to the target", &converted.dropped);
    converted.write(&args.output_dir, args.overwrite).map_err(report)?;
    let (algorithm, from) = (source.drafter().kind.title(), source.format());
    let (to, place) = (args.to, args.output_dir.display());
    match to {
        ExportTarget::Engine(engine) => {
            tracing::info!("{algorithm} converted from {from} to {to}: {place}");
            log_serve_command(args, engine, &source, &place.to_string());
        }
        ExportTarget::Format(_) => tracing::info!("{algorithm} converted from {from} to {to}: {place}"),
    }
    Ok(())
}

fn convert_to_gguf(args: &Args, source: &Checkpoint, target: Option<&Target>) -> anyhow::Result<()> {
    let Some(target) = target else {
        usage!(
            "--to gguf needs --target, whose tokenizer it holds and whose embedding and head llama.cpp will use"
        );
    };
    let gguf = GgufExport::plan(source, target, args.dtype.map(TensorType::from)).map_err(report)?;
    gguf.write(&args.output_dir, args.overwrite).map_err(report)?;
    let file = args.output_dir.join(GgufExport::FILE);
    if !gguf.has_known_pre_tokenizer {
        tracing::info!(
            "llama.cpp has no name for how the target's tokenizer splits texts; that matters to the target's own file, not to this one"
        );
    }
    let (kind, from) = (source.drafter().kind.title(), source.format());
    tracing::info!("{kind} converted from {from} to gguf: {}", file.display());
    log_serve_command(args, Engine::LlamaCpp, source, &file.display().to_string());
    Ok(())
}

fn log_serve_command(args: &Args, engine: Engine, source: &Checkpoint, path: &str) {
    let name = args.target.as_deref().unwrap_or("TARGET");
    // Engines do not know owner/name@revision.
    let repo = Repo::of_model_name(name, None);
    let (target, revision) = match &repo {
        Some(repo) => (repo.id.as_str(), repo.revision.as_deref()),
        None => (name, None),
    };
    tracing::info!("serve it with: {}", engine.serve_command(target, revision, source.drafter(), path));
}
