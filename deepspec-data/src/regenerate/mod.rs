//! `regenerate`: the target's own answers in place of the assistant's, keyed by id and resumable at any moment.

mod asker;
mod client;
mod ledger;
mod rows;
mod settings;

use std::collections::HashSet;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use deepspec_core::cli::{ExitWith, Verbosity};
use deepspec_core::progress::Progress;
use deepspec_core::usage;
use futures::{StreamExt, stream};
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

use crate::chat::{ChatModel, EngineArgs};
use crate::rejects;
use asker::{AskError, Asker};
use client::Client;
use ledger::Ledger;
use rows::{Row, Survey};
use settings::{Sampling, Settings};

/// Exit code of a run that was stopped and goes on when it is started again.
const TRY_AGAIN: u8 = 75;

/// What to ask, whom and how.
#[derive(clap::Args)]
pub struct Args {
    /// JSONL rows with `id` and `conversations`
    #[arg(long, required = true, num_args = 1.., value_name = "F")]
    input: Vec<PathBuf>,
    /// Where answered rows go, F.jsonl; failed ones go to F_error.jsonl, the settings to F.jsonl.run.json
    #[arg(long, value_name = "F")]
    output: PathBuf,
    /// Name of the model, as the servers know it
    #[arg(long, value_name = "NAME")]
    model: String,
    /// Base URL of an OpenAI-compatible server; give it again for more servers
    #[arg(long, num_args = 1.., value_name = "URL", required_unless_present = "embedded", conflicts_with = "embedded")]
    server: Vec<String>,
    /// Answer in this process with the model in this folder, without a server
    #[arg(long, value_name = "M")]
    embedded: Option<PathBuf>,
    /// Requests in flight at once, over all servers
    #[arg(long, default_value_t = 32, value_name = "N")]
    concurrency: usize,
    /// Seconds after which a server's answer is given up
    #[arg(long, default_value_t = 1800, value_name = "SECONDS")]
    timeout: u64,
    #[command(flatten)]
    sampling: Sampling,
    /// Ask again for rows that failed in an earlier run
    #[arg(long)]
    retry_failed: bool,
    /// Start anew where an output exists
    #[arg(long)]
    overwrite: bool,
    #[command(flatten, next_help_heading = "With --embedded")]
    engine: EngineArgs,
}

/// How the work on the pending rows ended.
enum Ending {
    Finished,
    Interrupted,
    Broken(anyhow::Error),
}

/// Runs the command.
///
/// # Errors
/// Usage errors; exit code 1 if rows failed or were malformed or no server answers, 75 if a signal stopped the run.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    check(args)?;
    let settings = Settings::new(&args.input, &args.model, &args.sampling)?;
    let survey = rows::survey(&args.input)?;
    let mut ledger = Ledger::open(&args.output, &settings, &survey, args.overwrite)?;
    rejects::report(&survey.rejected, &args.output)?;
    if args.retry_failed {
        ledger.forget_failed()?;
    }
    let ending = if ledger.pending(&survey) == 0 {
        Ending::Finished
    } else {
        answer_pending(args, &settings, &survey, &mut ledger, verbosity)?
    };
    ledger.sync()?;
    conclude(ending, &survey, &ledger)
}

fn check(args: &Args) -> anyhow::Result<()> {
    if args.concurrency == 0 || args.timeout == 0 {
        usage!("--concurrency and --timeout must be at least 1");
    }
    if let Some(missing) = args.input.iter().find(|input| !input.is_file()) {
        usage!("--input {}: no such file", missing.display());
    }
    if args.input.contains(&args.output) {
        usage!("--output {} is also an input", args.output.display());
    }
    match &args.embedded {
        Some(model) => args.engine.check(model),
        None => client::check_urls(&args.server),
    }
}

fn answer_pending(
    args: &Args,
    settings: &Settings,
    survey: &Survey,
    ledger: &mut Ledger,
    verbosity: Verbosity,
) -> anyhow::Result<Ending> {
    let asker = match &args.embedded {
        Some(model) => Asker::Embedded(Box::new(ChatModel::load(model, &args.engine)?), args.model.clone()),
        None => {
            Asker::Servers(Client::new(&args.server, Duration::from_secs(args.timeout), args.concurrency)?)
        }
    };
    let runtime = Runtime::new().context("starting the client's threads")?;
    let (total, pending) = (survey.ids.len() as u64, ledger.pending_ids(survey));
    let mut progress = Progress::new(verbosity, "rows", total, total - pending.len() as u64);
    let ending = runtime.block_on(work(Run {
        args,
        settings,
        asker: &asker,
        pending,
        ledger,
        progress: &mut progress,
    }));
    progress.finish();
    ending
}

/// Answers the pending rows until they are done or a signal comes.
async fn work(run: Run<'_>) -> anyhow::Result<Ending> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => Ok(Ending::Interrupted),
        _ = terminate.recv() => Ok(Ending::Interrupted),
        ending = run.answer_all() => ending,
    }
}

/// What the work on the pending rows needs.
struct Run<'a> {
    args: &'a Args,
    settings: &'a Settings,
    asker: &'a Asker,
    pending: HashSet<String>,
    ledger: &'a mut Ledger,
    progress: &'a mut Progress,
}

impl Run<'_> {
    /// Asks for so many rows at once and records each as it comes. May be dropped at any point: a row is either recorded
    /// whole or not at all.
    async fn answer_all(self) -> anyhow::Result<Ending> {
        if let Err(error) = self.asker.check().await {
            return Ok(Ending::Broken(error));
        }
        let ask = |row: anyhow::Result<Row>| async {
            let row = row?;
            let answered = row.answered(self.asker, self.settings).await;
            anyhow::Ok((row, answered))
        };
        let (started, mut tokens) = (Instant::now(), 0);
        let rows = rows::select(&self.args.input, self.pending);
        let mut answers = Box::pin(stream::iter(rows).map(ask).buffer_unordered(self.args.concurrency));
        while let Some(next) = answers.next().await {
            let (row, answered) = next?;
            match answered {
                Ok(answered) => {
                    tokens += answered.tokens;
                    self.ledger.record_ok(&row.id, &answered.fields)?;
                }
                Err(AskError::Row(problem)) => {
                    tracing::debug!("row {}: {problem}", row.id);
                    self.ledger.record_failed(row, &problem)?;
                }
                Err(AskError::Run(error)) => return Ok(Ending::Broken(error)),
            }
            self.progress
                .add(1, || format!("{:.0} tokens/s", tokens as f64 / started.elapsed().as_secs_f64()));
        }
        Ok(Ending::Finished)
    }
}

/// Prints the accounts and turns them into the exit code.
fn conclude(ending: Ending, survey: &Survey, ledger: &Ledger) -> anyhow::Result<()> {
    let (rows, malformed) = (survey.ids.len(), survey.rejected.len());
    let (ok, failed, pending) = (ledger.ok(), ledger.failed(), ledger.pending(survey));
    writeln!(
        io::stdout(),
        "{rows} rows = {ok} ok + {failed} failed + {pending} pending; {malformed} malformed lines"
    )?;
    match ending {
        Ending::Broken(error) => Err(error),
        Ending::Interrupted => {
            let reason = format!("stopped with {pending} rows pending; the same command goes on with them");
            Err(ExitWith { code: TRY_AGAIN, reason }.into())
        }
        Ending::Finished if failed + malformed > 0 => {
            let mut reason = format!("{failed} rows failed (see {})", ledger.failed_path().display());
            if malformed > 0 {
                reason = format!(
                    "{reason}, {malformed} lines were malformed (see {})",
                    rejects::path(ledger.output()).display()
                );
            }
            Err(ExitWith { code: 1, reason }.into())
        }
        Ending::Finished => Ok(()),
    }
}
