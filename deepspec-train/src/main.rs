//! Trains drafters for speculative decoding.

use std::process::ExitCode;

use deepspec_core::cli::{self, Verbosity};
use deepspec_core::env;
use deepspec_train::{Invocation, PRINTABLE_DESCRIPTIONS, run};

fn main() -> ExitCode {
    deepspec_ops::init_runtime();
    let invocation: Invocation =
        deepspec_core::command_line::parse(deepspec_ops::LIBTORCH_VERSION, &PRINTABLE_DESCRIPTIONS);
    // Rank 0 logs for the job; the other ranks log only warnings and errors.
    let follows = env::distributed_env().is_ok_and(|place| place.is_some_and(|place| place.rank > 0));
    cli::start_logging(if follows { Verbosity::Quiet } else { invocation.verbosity() });
    cli::run(|| match &invocation {
        Invocation::Train(args) => run(args),
        Invocation::Report(args) => args.run(),
    })
}
