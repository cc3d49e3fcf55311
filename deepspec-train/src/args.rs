//! The command line.

use std::path::PathBuf;

use clap::Parser;
use deepspec_core::cli::Verbosity;

/// Train a drafter by a recipe. Running the same recipe again resumes it.
#[derive(Debug, Parser)]
#[command(name = "deepspec-train", version)]
pub struct Args {
    /// The recipe, a YAML file.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Override a key of the recipe, such as train.lr=3e-4; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Print what would run and exit.
    #[arg(long)]
    pub plan: bool,
    /// Write the untrained drafter as step_0 and exit; training continues from it.
    #[arg(long)]
    pub init_only: bool,
    /// Where to train: auto, cpu, cuda or cuda:N.
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Processes on this machine; one per visible GPU if it is left out, on the CPU one.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub processes: Option<u16>,
    /// Throw away earlier checkpoints of this experiment and start anew.
    #[arg(long)]
    pub overwrite: bool,
    /// Only warnings and errors.
    #[arg(long, short)]
    pub quiet: bool,
    /// Also say why.
    #[arg(long, short)]
    pub verbose: bool,
}

impl Args {
    /// How much is said.
    pub fn verbosity(&self) -> Verbosity {
        Verbosity::from_flags(self.quiet, self.verbose)
    }
}
