//! The command line.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::error::Result as ParseResult;
use clap::{ArgGroup, ArgMatches, Command, CommandFactory, FromArgMatches, Parser};
use deepspec_core::cli::Verbosity;

use crate::estimate::EstimateArgs;
use crate::run_report::ReportArgs;

/// The work that the command line asks for.
#[derive(Debug)]
pub enum Invocation {
    /// Training, or its plan or benchmark.
    Train(Box<Args>),
    /// `report`: the page of a run's metrics.
    Report(ReportArgs),
}

impl Invocation {
    /// How much is logged.
    pub fn verbosity(&self) -> Verbosity {
        match self {
            Self::Train(args) => args.verbosity(),
            Self::Report(args) => args.verbosity(),
        }
    }
}

impl CommandFactory for Invocation {
    fn command() -> Command {
        Args::command()
            .subcommand_negates_reqs(true)
            .args_conflicts_with_subcommands(true)
            .subcommand(ReportArgs::command().name("report"))
    }

    // clap requires it; parsing never updates a value.
    fn command_for_update() -> Command {
        Self::command()
    }
}

impl FromArgMatches for Invocation {
    fn from_arg_matches(matches: &ArgMatches) -> ParseResult<Self> {
        match matches.subcommand() {
            Some(("report", arguments)) => ReportArgs::from_arg_matches(arguments).map(Self::Report),
            _ => Args::from_arg_matches(matches).map(|args| Self::Train(Box::new(args))),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> ParseResult<()> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Parser for Invocation {}

/// Train a drafter by a recipe. Running the same recipe again resumes it.
#[derive(Debug, Parser)]
#[command(name = "deepspec-train", group(ArgGroup::new("dry").args(["plan", "bench"])))]
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
    /// Time this many optimiser steps on random states and exit. Needs neither data nor the target's weights, only its
    /// sizes.
    #[arg(long, value_name = "STEPS")]
    pub bench: Option<NonZeroUsize>,
    /// The device's dense peak in TFLOP/s, for the share of it that --bench reaches; known for some GPUs.
    #[arg(long, value_name = "N", requires = "bench")]
    pub peak_tflops: Option<f64>,
    /// Print the output of --plan or --bench as JSON.
    #[arg(long, requires = "dry")]
    pub json: bool,
    /// Write a PyTorch profiler trace of five steps of a run or of --bench, after three warm-up steps, for chrome://tracing and
    /// ui.perfetto.dev. Rank 0 writes it; a file that exists is kept.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["plan", "init_only"])]
    pub torch_profile: Option<PathBuf>,
    /// Write the untrained drafter as step_0 and exit; training continues from it.
    #[arg(long)]
    pub init_only: bool,
    /// Where to train: auto, cpu, cuda, cuda:N, or cuda:{local_rank+N} for several processes.
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Processes on this machine; by default one per visible GPU, or one on the CPU.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub processes: Option<u16>,
    /// Throw away earlier checkpoints of this experiment and start anew.
    #[arg(long)]
    pub overwrite: bool,
    /// Arguments of the estimate of all stages.
    #[command(flatten)]
    pub estimate: EstimateArgs,
    /// Only warnings and errors
    #[arg(long, short)]
    pub quiet: bool,
    /// Log more: also reasons and details
    #[arg(long, short)]
    pub verbose: bool,
}

impl Args {
    /// Amount of log output.
    pub fn verbosity(&self) -> Verbosity {
        Verbosity::from_flags(self.quiet, self.verbose)
    }
}
