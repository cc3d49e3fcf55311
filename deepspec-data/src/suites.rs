//! `suites`: writes prompt files for `deepspec-eval` from public or own datasets.

use std::io::Write;
use std::path::PathBuf;

use deepspec_core::cli::{self, ExitWith, Verbosity, one_line};
use deepspec_core::{atomic, digest};

use deepspec_datasets::suites::{Fetcher, StoreResult, SuiteSelection, SuiteStore};

/// Which suites to write, from what, and where to.
#[derive(clap::Args)]
pub struct Args {
    /// Suite to write; may be repeated. Without --suite, --description and --source it is all twelve public ones
    #[arg(long = "suite", value_name = "NAME")]
    suites: Vec<String>,
    /// YAML file that describes a suite of your own, which is written; may be repeated
    #[arg(long = "description", value_name = "F.yaml")]
    descriptions: Vec<PathBuf>,
    /// Read a suite's rows from this file instead of the hub, in the hub's format (parquet or JSONL). May be repeated, also
    /// for one suite
    #[arg(long = "source", value_name = "NAME=FILE")]
    sources: Vec<String>,
    /// Folder for NAME.jsonl and suites.json
    #[arg(long, value_name = "DIR", default_value = "eval_datasets")]
    output_dir: PathBuf,
    /// Replace suites that are there
    #[arg(long)]
    overwrite: bool,
    /// Write nothing, but show the suites and what is there of them
    #[arg(long, conflicts_with_all = ["suites", "descriptions", "sources", "overwrite"])]
    list: bool,
    /// Show it as JSON
    #[arg(long, requires = "list")]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// With a usage error before any file is written. If one of several suites fails, the others are
/// still written and the exit code is 1.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    if args.list {
        return deepspec_datasets::suites::list(&args.output_dir, args.json);
    }
    let (suites, descriptions, sources) = (&args.suites, &args.descriptions, &args.sources);
    let plans = deepspec_datasets::suites::select_plans(&SuiteSelection { suites, descriptions, sources })?;
    atomic::create_dir(&args.output_dir)?;
    let store = SuiteStore::open(&args.output_dir, args.overwrite)?;
    let mut fetcher = Fetcher::new(verbosity);
    let (mut written, mut kept, mut failed) = (0, 0, vec![]);
    for plan in &plans {
        match store.ensure_stored(plan, &mut fetcher) {
            Ok(StoreResult { entry, new }) => {
                *(if new { &mut written } else { &mut kept }) += 1;
                let what = if new { "rows" } else { "rows, there already," };
                let (name, rows, digest) = (&plan.name, entry.rows, digest::short_digest(&entry.sha256));
                let origin = deepspec_datasets::suites::describe_origin(&entry.source);
                writeln!(cli::stdout(), "{name}: {rows} {what} from {origin}, sha256 {digest}")?;
            }
            Err(error) if plans.len() == 1 => return Err(error.context(plan.name.clone())),
            Err(error) => {
                tracing::warn!("{} is not written: {}", plan.name, one_line(&error));
                failed.push(plan.name.as_str());
            }
        }
    }
    let total = plans.len();
    writeln!(
        cli::stdout(),
        "{total} suites = {written} written + {kept} there already + {} failed",
        failed.len()
    )?;
    if !failed.is_empty() {
        let reason =
            format!("{} of {total} suites failed, as told above: {}", failed.len(), failed.join(", "));
        return Err(ExitWith { code: 1, reason }.into());
    }
    Ok(())
}
