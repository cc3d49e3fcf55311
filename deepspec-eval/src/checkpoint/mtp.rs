//! `checkpoint extract-mtp` and `checkpoint merge-mtp`: the drafter in a target's own checkpoint as a folder, and back.

use std::path::{Path, PathBuf};

use deepspec_checkpoint::Target;
use deepspec_core::cli::Verbosity;
use deepspec_core::usage;
use deepspec_drafters::{extract_mtp, merge_mtp, open_checkpoint};

use super::{model_folder, report};

/// Arguments of `checkpoint extract-mtp`.
#[derive(clap::Args)]
pub struct ExtractArgs {
    /// Folder or hub id of the target, whose checkpoint stores an MTP layer (tensors mtp.*)
    #[arg(long, value_name = "M")]
    target: String,
    /// Folder to write
    #[arg(long, value_name = "D")]
    output_dir: PathBuf,
    /// Tokens that it drafts, one after the other
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=64))]
    num_speculative_steps: u64,
    /// Replace an extracted drafter that exists
    #[arg(long)]
    overwrite: bool,
}

/// Arguments of `checkpoint merge-mtp`.
#[derive(clap::Args)]
pub struct MergeArgs {
    /// Folder or hub id of an MTP-1 drafter or a DSpark of DeepSeek-V4 that was trained for this target
    #[arg(long, value_name = "D")]
    draft: String,
    /// Folder or hub id of the target
    #[arg(long, value_name = "M")]
    target: String,
    /// Folder to write: a copy of the target with the drafter as its tensors mtp.*
    #[arg(long, value_name = "D")]
    output_dir: PathBuf,
    /// Replace a merged target that exists
    #[arg(long)]
    overwrite: bool,
}

/// Runs `checkpoint extract-mtp`.
///
/// # Errors
/// Targets without an MTP layer, broken checkpoints, and outputs that cannot be written.
pub fn extract(args: &ExtractArgs, verbosity: Verbosity) -> anyhow::Result<()> {
    let dir = model_folder("--target", &args.target, verbosity)?;
    let steps = args.num_speculative_steps as usize;
    write_mtp_of_target(&dir, &args.target, steps, &args.output_dir, args.overwrite)?;
    tracing::info!("the target's MTP layer is a drafter in {}", args.output_dir.display());
    Ok(())
}

/// Writes the MTP layer of the target in the folder `target`, whose name is `name`, as a drafter that drafts `steps` tokens.
///
/// # Errors
/// As [`extract`].
pub fn write_mtp_of_target(
    target: &Path,
    name: &str,
    steps: usize,
    output_dir: &Path,
    overwrite: bool,
) -> anyhow::Result<()> {
    let target = Target::open(target, name).map_err(report)?;
    extract_mtp(&target, steps)?.write(output_dir, overwrite).map_err(report)
}

/// Runs `checkpoint merge-mtp`.
///
/// # Errors
/// Drafters and targets that do not belong together, broken checkpoints, and outputs that cannot be written.
pub fn merge(args: &MergeArgs, verbosity: Verbosity) -> anyhow::Result<()> {
    let draft = model_folder("--draft", &args.draft, verbosity)?;
    let dir = model_folder("--target", &args.target, verbosity)?;
    let out = args.output_dir.canonicalize().ok();
    for (flag, input) in [("--draft", &draft), ("--target", &dir)] {
        if out.is_some() && out == input.canonicalize().ok() {
            usage!("--output-dir is the folder of {flag}; choose another one");
        }
    }
    let source = open_checkpoint(&draft).map_err(report)?;
    let target = Target::open(&dir, &args.target).map_err(report)?;
    merge_mtp(&source, &target)?.write(&args.output_dir, args.overwrite).map_err(report)?;
    let (place, drafter) = (args.output_dir.display(), source.drafter());
    let (method, drafts) = (drafter.kind.method(), drafter.kind.draft_len());
    tracing::info!("{place} is the target with the drafter in it");
    if method == "mtp" {
        tracing::info!(
            "for llama.cpp, convert it with convert_hf_to_gguf.py and serve it with: llama-server --model FILE.gguf --spec-type draft-mtp --spec-draft-n-max {drafts}"
        );
    } else if drafter.taps.len() as u64 == drafter.layers {
        tracing::info!(
            "for SGLang, serve it with: python3 -m sglang.launch_server --model-path {place} --speculative-algorithm DSPARK"
        );
    } else {
        tracing::warn!(
            "SGLang does not load it: it counts the stages by the captured layers, which are {} and not {}",
            drafter.taps.len(),
            drafter.layers
        );
    }
    tracing::info!(
        "serve it with: vllm serve {place} --speculative-config '{{\"method\": \"{method}\", \"num_speculative_tokens\": {drafts}}}'"
    );
    Ok(())
}
