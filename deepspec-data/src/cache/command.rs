//! Subcommands of `cache`.

use deepspec_core::cli::Verbosity;

use super::{build, inspect, merge, plan, reference, verify};

/// Subcommands of `cache`.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Estimate the size and duration of a build, before anything runs
    Plan(plan::Args),
    /// Run the target over conversations and keep its hidden states; the same command resumes after a kill
    Build(build::Args),
    /// Publish what the workers of a build have finished, after checking that all of it is there
    Merge(merge::Args),
    /// Import a target cache of the reference's format 2
    Import(reference::ImportArgs),
    /// Write a cache in the reference's format 2; needs bf16 and all last states
    Export(reference::ExportArgs),
    /// Check every byte of a cache
    Verify(verify::Args),
    /// Show the contents of a cache or of one sample
    Inspect(inspect::Args),
}

/// Runs the command.
///
/// # Errors
/// With a usage error. Exits with code 1 if rows were rejected or a cache is damaged.
pub fn run(command: &Command, verbosity: Verbosity) -> anyhow::Result<()> {
    match command {
        Command::Build(args) => build::run(args, verbosity),
        Command::Plan(args) => plan::run(args, verbosity),
        Command::Merge(args) => merge::run(args, verbosity),
        Command::Import(args) => reference::import(args, verbosity),
        Command::Export(args) => reference::export(args, verbosity),
        Command::Verify(args) => verify::run(args, verbosity),
        Command::Inspect(args) => inspect::run(args),
    }
}
