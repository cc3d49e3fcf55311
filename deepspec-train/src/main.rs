//! Trains drafters for speculative decoding.

use std::process::ExitCode;

use clap::Parser;
use deepspec_core::cli;
use deepspec_train::{Args, run};

fn main() -> ExitCode {
    deepspec_dist::prepare_process();
    let args = Args::parse();
    cli::start_logging(args.verbosity());
    cli::run(|| run(&args))
}
