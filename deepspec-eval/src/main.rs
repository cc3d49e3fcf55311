//! Measures drafters for speculative decoding.

mod calibration;
mod checkpoint;
mod compare;
mod confidence;
mod economics;
mod explorer;
mod load;
mod output;
mod plot;
mod profile;
mod report;
mod results;
mod run;
mod simulate;
mod statistics;
mod table;
mod trace;
mod traces;
mod transfer;
mod versioned;
mod watch;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use deepspec_core::cli::{self, Verbosity};

/// Measures drafters for speculative decoding.
#[derive(Parser)]
#[command(name = "deepspec-eval")]
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
    /// Decode prompt suites with a drafter and measure its accepted length and speed
    Run(Box<run::Args>),
    /// Show several results side by side, and how sure their differences are
    Compare(compare::Args),
    /// Say whether a drafter serves another target, such as a fine-tuned one, before anything is trained
    Transfer(transfer::Args),
    /// Print one generation cycle by cycle: what was accepted, rejected and added
    Trace(Box<trace::Args>),
    /// Look into drafter checkpoints of any tool, convert them, and find out what is wrong with one
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// Measure the time of a step by tokens in the batch, for the file that --cost takes
    Profile(profile::Args),
    /// Send requests to a server as many users would, and measure throughput and latencies
    Load(load::Args),
    /// Compute the cost of a speculated token on an accelerator and the best draft length, before anything is trained
    Economics(economics::Args),
    /// Read the metrics of a running engine over time: accepted length, wasted verification and speed by load
    Watch(watch::Args),
    /// Predict the throughput of schedules at each load from a recorded run, before anything is served
    Simulate(simulate::Args),
    /// Fit temperatures that calibrate a drafter's confidences to the observed acceptance
    Calibrate(calibration::Args),
}

fn main() -> ExitCode {
    deepspec_ops::init_runtime();
    let cli: Cli = deepspec_core::command_line::parse(deepspec_ops::LIBTORCH_VERSION, &[]);
    let verbosity = Verbosity::from_flags(cli.quiet, cli.verbose);
    cli::start_logging(verbosity);
    cli::run(|| match cli.command {
        Command::Run(args) => run::run(&args, verbosity),
        Command::Compare(args) => compare::run(&args),
        Command::Transfer(args) => transfer::run(&args, verbosity),
        Command::Trace(args) => trace::run(&args, verbosity),
        Command::Checkpoint(command) => checkpoint::run(&command, verbosity),
        Command::Profile(args) => profile::run(&args, verbosity),
        Command::Load(args) => load::run(&args, verbosity),
        Command::Economics(args) => economics::run(&args, verbosity),
        Command::Watch(args) => watch::run(&args, verbosity),
        Command::Simulate(args) => simulate::run(&args, verbosity),
        Command::Calibrate(args) => calibration::run(&args),
    })
}
