//! Prompts, answers and target states for training drafters.

mod cache;
mod chat;
mod regenerate;
mod rejects;
mod serve;
mod split;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use deepspec_core::cli::{self, Verbosity};

/// Prompts, answers and target states for training drafters.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Say nothing but warnings, errors and results
    #[arg(long, short, global = true)]
    quiet: bool,
    /// Also say why
    #[arg(long, short, global = true)]
    verbose: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Cut a dataset into training conversations and held-out prompts
    Split(split::Args),
    /// Answer chat requests over HTTP as the OpenAI API does
    Serve(serve::Args),
    /// Replace the assistant's messages by the target's own answers
    Regenerate(regenerate::Args),
    /// Keep the target's hidden states on disk
    #[command(subcommand)]
    Cache(cache::Command),
}

fn main() -> ExitCode {
    deepspec_dist::prepare_process();
    let cli = Cli::parse();
    let verbosity = Verbosity::from_flags(cli.quiet, cli.verbose);
    cli::start_logging(verbosity);
    cli::run(|| match cli.command {
        Command::Split(args) => split::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Regenerate(args) => regenerate::run(&args, verbosity),
        Command::Cache(command) => cache::run(&command, verbosity),
    })
}
