//! `regenerate`: the target's own answers in place of the assistant's, keyed by id and resumable at any moment.

mod answer;
mod asker;
mod ids;
mod ledger;
mod overrides;
mod pool;
mod report;
mod reuse;
mod rows;
mod settings;
mod survey;
mod wire;
mod work;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use anyhow::Context;
use deepspec_core::cli::{ExitWith, Verbosity};
use deepspec_core::progress::Progress;
use deepspec_core::{env, usage};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::chat::{ChatModel, EngineArgs};
use crate::{places, rejects};
use asker::{Asker, Embedded};
use ids::IdSet;
use ledger::{Done, Ledger};
use pool::{Options, Pool};
use report::{Accounts, DryRun};
use settings::{Sampling, Settings};
use survey::Survey;
use work::{Ending, Work};

/// Exit code of a run that was stopped and goes on when it is started again.
const TRY_AGAIN: u8 = 75;
/// Most requests in flight that a server may be given.
const MOST_CONCURRENT: usize = 65_536;
/// Requests that a dry run shows.
const SHOWN: usize = 3;

/// What to ask, whom and how.
#[derive(clap::Args)]
pub struct Args {
    /// JSONL rows with `id` and `conversations`, plain, .gz or .zst; `tools` and `sampling` of a row are respected
    #[arg(long, required = true, num_args = 1.., value_name = "F")]
    input: Vec<PathBuf>,
    /// Where answered rows go, F.jsonl; failed ones go to F_error.jsonl, settings and accounts to F.jsonl.*.json
    #[arg(long, value_name = "F")]
    output: PathBuf,
    /// Name of the model, as the servers know it
    #[arg(long, value_name = "NAME")]
    model: String,
    /// Base URL of an OpenAI-compatible server; give it again for more servers
    #[arg(long, num_args = 1.., value_name = "URL", required_unless_present = "embedded", conflicts_with = "embedded")]
    server: Vec<String>,
    /// Answer in this process with the model of this folder or hub id, without a server
    #[arg(long, value_name = "M")]
    embedded: Option<String>,
    /// Requests in flight at once, per server
    #[arg(long, default_value_t = 32, value_name = "N")]
    concurrency: usize,
    /// Seconds after which a server's answer is given up
    #[arg(long, default_value_t = 1800, value_name = "SECONDS")]
    timeout: u64,
    /// Attempts per request, pauses that servers ask for and servers that cannot be reached not counted
    #[arg(long, default_value_t = 5, value_name = "N")]
    attempts: u32,
    /// Seconds to wait when no server answers, before the run ends with the rest of the rows pending
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    patience: u64,
    /// Environment variable with the servers' API key
    #[arg(long, default_value = "OPENAI_API_KEY", value_name = "NAME")]
    api_key_env: String,
    #[command(flatten)]
    sampling: Sampling,
    /// Take over the answers of an earlier output of the same model and settings, where id and prompt are the same
    #[arg(long, num_args = 1.., value_name = "F")]
    reuse: Vec<PathBuf>,
    /// Show what would be asked, and ask nothing
    #[arg(long)]
    dry_run: bool,
    /// Ask again for rows that failed in an earlier run
    #[arg(long)]
    retry_failed: bool,
    /// Start anew where an output exists
    #[arg(long)]
    overwrite: bool,
    #[command(flatten, next_help_heading = "With --embedded")]
    engine: EngineArgs,
}

/// Runs the command.
///
/// # Errors
/// Usage errors; exit code 1 if rows failed or were malformed or no server answers, 75 if a signal stopped the run.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    check(args)?;
    let embedded = args.embedded.as_deref().filter(|_| !args.dry_run);
    let embedded = embedded.map(|model| args.engine.resolve("--embedded", model, verbosity)).transpose()?;
    let settings = Arc::new(Settings::new(&args.input, &args.model, &args.sampling)?);
    reuse::check(&args.reuse, &settings)?;
    let survey = survey::survey(&args.input, &settings)?;
    if args.dry_run {
        return dry_run(args, &settings, &survey);
    }
    let mut ledger = Ledger::open(&args.output, &settings, &survey, args.overwrite)?;
    rejects::report(&survey.rejected, &args.output)?;
    if args.retry_failed {
        ledger.forget_failed()?;
    }
    let mut accounts = Accounts::new();
    if !args.reuse.is_empty() && ledger.pending(&survey) > 0 {
        accounts.reused = reuse::take_over(&args.reuse, &args.input, &settings, &mut ledger)?;
        tracing::info!("{} rows taken over from earlier outputs", accounts.reused);
    }
    let (mut ending, mut asker) = (Ending::Finished, None);
    if ledger.pending(&survey) > 0 {
        let runtime = Runtime::new().context("starting the client's threads")?;
        let whom = Arc::new(whom(args, embedded)?);
        asker = Some(Arc::clone(&whom));
        let (total, pending) = (survey.ids.len() as u64, ledger.pending(&survey) as u64);
        let work = Work {
            inputs: args.input.clone(),
            settings,
            workers: workers(&whom, args.concurrency),
            asker: whom,
            survey: &survey,
            ledger: &mut ledger,
            accounts: &mut accounts,
            progress: Progress::new(verbosity, "rows", total, total - pending),
        };
        ending = runtime.block_on(work.run())?;
        // Requests that are still under way must not keep a stopped run alive.
        runtime.shutdown_background();
    }
    ledger.sync()?;
    accounts.write(&survey, &ledger, asker.as_deref())?;
    accounts.print(&survey, &ledger, asker.as_deref())?;
    conclude(ending, &survey, &ledger)
}

fn check(args: &Args) -> anyhow::Result<()> {
    if args.concurrency == 0 || args.timeout == 0 || args.attempts == 0 || args.patience == 0 {
        usage!("--concurrency, --timeout, --attempts and --patience must be at least 1");
    }
    if args.concurrency > MOST_CONCURRENT {
        usage!("--concurrency {}: expected at most {MOST_CONCURRENT}", args.concurrency);
    }
    for input in &args.input {
        match input {
            _ if input.to_str().is_none() => usage!("--input {}: the path is not UTF-8", input.display()),
            _ if input.is_dir() => usage!("--input {} is a folder; name its files", input.display()),
            _ if !input.is_file() => usage!("--input {}: no such file", input.display()),
            _ => {}
        }
    }
    let extension = args.output.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    if matches!(extension, "gz" | "zst") {
        usage!("--output {}: rows are appended one by one and not compressed", args.output.display());
    }
    // Not the spelling of the names but the files: starting anew empties or removes them.
    for written in ledger::files(&args.output) {
        for read in args.input.iter().chain(&args.reuse) {
            if places::same(&written, read) {
                usage!(
                    "--output {}: it would replace {}, which is read",
                    args.output.display(),
                    read.display()
                );
            }
        }
    }
    if let Some(key) = env::secret(&args.api_key_env)
        && !key.bytes().all(|byte| byte.is_ascii_graphic())
    {
        usage!("the API key in {} has characters that no HTTP header may have", args.api_key_env);
    }
    pool::check_urls(&args.server)
}

/// Loads the model of this process, or sets up the client of the servers.
fn whom(args: &Args, embedded: Option<(PathBuf, EngineArgs)>) -> anyhow::Result<Asker> {
    if let Some((dir, engine)) = embedded {
        let model = Box::new(ChatModel::load(&dir, &engine)?);
        return Ok(Asker::Embedded(Embedded {
            model,
            name: args.model.clone(),
            in_flight: AtomicUsize::new(0),
        }));
    }
    let options = Options {
        concurrency: args.concurrency,
        timeout: Duration::from_secs(args.timeout),
        attempts: args.attempts,
        patience: Duration::from_secs(args.patience),
        api_key: env::secret(&args.api_key_env),
    };
    Ok(Asker::Servers(Arc::new(Pool::new(&args.server, options)?)))
}

/// Rows that are worked on at once: more than fit in at the servers, so that a seat never waits for a row.
fn workers(asker: &Asker, concurrency: usize) -> usize {
    match asker {
        Asker::Servers(pool) => 2 * pool.capacity(),
        Asker::Embedded(_) => concurrency,
    }
}

fn dry_run(args: &Args, settings: &Settings, survey: &Survey) -> anyhow::Result<()> {
    let mut done = if args.overwrite { Done::default() } else { Done::read(&args.output, settings, survey)? };
    if args.retry_failed {
        done.failed.clear();
    }
    let (mut reused, mut taken, ok, failed) = (0, IdSet::default(), done.ok.len(), done.failed.len());
    if !args.reuse.is_empty() {
        let mut earlier = reuse::Earlier::read(&args.reuse)?;
        let lacks = |id: &str| done.lacks(id);
        reused = earlier.take(&args.input, settings, lacks, |id, _| {
            taken.insert(id);
            Ok(())
        })?;
    }
    let (mut first, mut asked, mut requests): (Vec<Value>, usize, u64) = (vec![], 0, 0);
    for row in survey::select(&args.input, settings, |id| done.lacks(id) && !taken.contains(id)) {
        let row = row?;
        (asked, requests) = (asked + 1, requests + row.turns() as u64);
        if first.len() < SHOWN {
            let (id, turns) = (&row.id, row.turns());
            first.push(json!({"id": id, "requests": turns, "first": row.first_request(settings)}));
        }
    }
    let malformed = survey.rejected.len();
    DryRun { output: &args.output, ok, failed, reused, asked, requests, malformed, first }.print()?;
    Ok(())
}

/// Turns the end of the run into the exit code.
fn conclude(ending: Ending, survey: &Survey, ledger: &Ledger) -> anyhow::Result<()> {
    let (malformed, failed, pending) =
        (survey.rejected.len(), ledger.done().failed.len(), ledger.pending(survey));
    match ending {
        Ending::Broken(error) => Err(error),
        Ending::Interrupted => {
            let reason = format!("stopped with {pending} rows pending; the same command goes on with them");
            Err(ExitWith { code: TRY_AGAIN, reason }.into())
        }
        Ending::Finished if pending > 0 => {
            let reason = format!(
                "{pending} rows are pending but no longer in the inputs, which were changed during the run"
            );
            Err(ExitWith { code: 1, reason }.into())
        }
        Ending::Finished if failed + malformed > 0 => {
            let mut reasons = vec![];
            if failed > 0 {
                reasons.push(format!("{failed} rows failed (see {})", ledger.failed_path().display()));
            }
            if malformed > 0 {
                let rejects = rejects::path(ledger.output());
                reasons.push(format!("{malformed} lines were malformed (see {})", rejects.display()));
            }
            Err(ExitWith { code: 1, reason: reasons.join(", ") }.into())
        }
        Ending::Finished => Ok(()),
    }
}
