//! `checkpoint`: inspects, converts and diagnoses drafter checkpoints of any tool.

mod convert;
mod doctor;
mod inspect;
mod mtp;

use std::path::PathBuf;

use anyhow::Context;
use deepspec_checkpoint::CheckpointError;
use deepspec_core::cli::{UsageError, Verbosity};
use deepspec_hub::{HubError, ModelFiles, model_dir, model_files};

pub use mtp::write_mtp_of_target;

/// Subcommands of `checkpoint`.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Show a checkpoint's format and contents
    Inspect(inspect::Args),
    /// Write a checkpoint in another tool's layout, its weights byte for byte
    Convert(convert::Args),
    /// Write the MTP layer that a target's checkpoint stores (Qwen3.5, Qwen3.5-MoE) as a drafter, its weights byte for byte
    ExtractMtp(mtp::ExtractArgs),
    /// Write a copy of a target (Qwen3.5, Qwen3.5-MoE, DeepSeek-V4) with a drafter (MTP-1, DeepSeek-V4's DSpark) in it, as engines load it
    MergeMtp(mtp::MergeArgs),
    /// Measure a drafter on a few prompts and name the likeliest cause of a low accepted length
    Doctor(doctor::Args),
}

/// Runs the command.
///
/// # Errors
/// Usage errors, broken checkpoints, and outputs that cannot be written.
pub fn run(command: &Command, verbosity: Verbosity) -> anyhow::Result<()> {
    match command {
        Command::Inspect(args) => inspect::run(args, verbosity),
        Command::Convert(args) => convert::run(args, verbosity),
        Command::ExtractMtp(args) => mtp::extract(args, verbosity),
        Command::MergeMtp(args) => mtp::merge(args, verbosity),
        Command::Doctor(args) => doctor::run(args, verbosity),
    }
}

/// The folder of a model, downloaded for a hub id; `flag` is the context of errors.
fn model_folder(flag: &'static str, model: &str, verbosity: Verbosity) -> anyhow::Result<PathBuf> {
    model_dir(model, None, verbosity).map_err(HubError::report).context(flag)
}

/// The folder of a target whose layers are not needed.
fn target_folder(model: &str, verbosity: Verbosity) -> anyhow::Result<PathBuf> {
    let dir = model_files(model, None, ModelFiles::WithoutLayers, verbosity);
    dir.map_err(HubError::report).context("--target")
}

/// Maps a refusal to a usage error, and keeps all other errors.
fn report(error: CheckpointError) -> anyhow::Error {
    match error {
        CheckpointError::Refused { .. } | CheckpointError::Exists { .. } => {
            UsageError(error.to_string()).into()
        }
        other => other.into(),
    }
}
