//! Prompts, answers and target states for training drafters.

mod cache;
mod inspect;
mod regenerate;
mod rejected_rows;
mod same_file;
mod split;
mod states;
mod suites;
mod worker;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use deepspec_core::cli::{self, Verbosity};

/// Prompts, answers and target states for training drafters.
#[derive(Parser)]
#[command(name = "deepspec-data")]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Only warnings and errors
    #[arg(long, short, global = true, help_heading = "Output")]
    quiet: bool,
    /// Log more: also reasons and details
    #[arg(long, short, global = true, help_heading = "Output")]
    verbose: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Cut a dataset into training conversations and held-out prompts
    Split(split::Args),
    /// Write the prompt suites that drafters are scored on
    Suites(suites::Args),
    /// Answer chat requests over HTTP as the OpenAI API does
    Serve(deepspec_serve::http::Args),
    /// Replace the assistant's messages by the target's own answers
    Regenerate(Box<regenerate::Args>),
    /// Show which tokens a drafter would be trained on, and find faulty rows
    ///
    /// On a terminal, supervised text has a green background and special tokens are dim. Elsewhere, or where NO_COLOR is
    /// set, supervised text stands between ⟦ and ⟧. All rows are checked, whichever are shown. The exit code is 1 if a row
    /// is unusable, or if its mask is empty or differs from the assistant's text. It is also 1 if a row's template differs
    /// from the served one.
    Inspect(inspect::Args),
    /// Choose the tokens of a reduced draft vocabulary by their frequency
    ///
    /// Counts the tokens that a drafter would be trained on. A recipe of Eagle3 or P-EAGLE names the file in `draft_vocab`.
    DraftVocab(inspect::draft_vocab::Args),
    /// Keep the target's hidden states on disk
    #[command(subcommand)]
    Cache(cache::Command),
    /// Take the target's hidden states from vLLM servers
    #[command(subcommand)]
    States(states::Subcommand),
}

fn main() -> ExitCode {
    deepspec_ops::init_runtime();
    let cli: Cli = deepspec_core::command_line::parse(deepspec_ops::LIBTORCH_VERSION, &[]);
    let verbosity = Verbosity::from_flags(cli.quiet, cli.verbose);
    cli::start_logging(verbosity);
    cli::run(|| match cli.command {
        Command::Split(args) => split::run(&args, verbosity),
        Command::Serve(args) => deepspec_serve::http::run(&args, verbosity),
        Command::Suites(args) => suites::run(&args, verbosity),
        Command::Regenerate(args) => regenerate::run(&args, verbosity),
        Command::Inspect(args) => inspect::run(&args, verbosity),
        Command::DraftVocab(args) => inspect::draft_vocab::run(&args, verbosity),
        Command::Cache(command) => cache::run(&command, verbosity),
        Command::States(command) => states::run(&command, verbosity),
    })
}
