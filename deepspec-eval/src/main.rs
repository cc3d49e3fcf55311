//! Measures drafters for speculative decoding.

mod calibration;
mod checkpoint;
mod compare;
mod confidence;
mod output;
mod plot;
mod report;
mod results;
mod run;
mod statistics;
mod table;
mod trace;
mod traces;
mod versioned;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use deepspec_core::cli::{self, Verbosity};

/// Measures drafters for speculative decoding.
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
    /// Decode prompt suites with a drafter and measure its accepted length and speed
    Run(Box<run::Args>),
    /// Show several results side by side, and how sure their differences are
    Compare(compare::Args),
    /// Print one generation cycle by cycle: what was accepted, rejected and added
    Trace(Box<trace::Args>),
    /// Look into drafter checkpoints of any tool, convert them, and find out what is wrong with one
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// Find temperatures that make a drafter's confidences say what happens
    Calibrate(calibration::Args),
}

fn main() -> ExitCode {
    deepspec_native::prepare_process();
    let cli = Cli::parse();
    let verbosity = Verbosity::from_flags(cli.quiet, cli.verbose);
    cli::start_logging(verbosity);
    cli::run(|| match cli.command {
        Command::Run(args) => run::run(&args, verbosity),
        Command::Compare(args) => compare::run(&args),
        Command::Trace(args) => trace::run(&args, verbosity),
        Command::Checkpoint(command) => checkpoint::run(&command, verbosity),
        Command::Calibrate(args) => calibration::run(&args),
    })
}
