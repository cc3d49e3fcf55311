//! `regenerate`: replaces the assistant's answers by answers of the target. Rows are keyed by id, and a run can resume
//! at any point.

mod answer;
mod backend;
mod ids;
mod index;
pub mod openai_messages;
mod overrides;
mod pool;
mod report;
mod reuse;
mod rows;
mod settings;
mod store;
mod with_states;
mod work;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use anyhow::Context;
use deepspec_capture::cache::Worker;
use deepspec_core::cli::{self, ExitWith, Verbosity};
use deepspec_core::progress::Progress;
use deepspec_core::{jsonl, usage};
use deepspec_models::weights_digest;
use deepspec_serve::{ChatModel, EngineArgs};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::worker::parse_worker;
use crate::{rejected_rows, same_file};
use backend::{Backend, Embedded};
use ids::IdSet;
use index::InputIndex;
use pool::{Options, Pool};
use report::RunStats;
use settings::{RequestSettings, Sampling};
use store::{FinishedRows, ResultStore};
use with_states::StatesArgs;
use work::{Ending, Work};

/// Exit code of an interrupted run that resumes when it is started again.
const TRY_AGAIN_EXIT_CODE: u8 = 75;
/// Number of requests that a dry run shows.
const MAX_SHOWN_REQUESTS: usize = 3;

/// Arguments of `regenerate`.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("answering").required(true).args(["server", "local_model"]))]
pub struct Args {
    /// JSONL rows of conversations or prompts, plain, .gz or .zst; `tools` and `sampling` of a row are respected
    #[arg(long, required = true, num_args = 1.., value_name = "F")]
    input: Vec<PathBuf>,
    /// Where answered rows go, F.jsonl; failed ones go to F_error.jsonl, settings and accounts to F.jsonl.*.json
    #[arg(long, value_name = "F")]
    output: PathBuf,
    /// Name of the model, as the servers know it; with --local-model another name for it
    #[arg(long, value_name = "NAME", required_unless_present = "local_model")]
    model: Option<String>,
    /// Base URL of an OpenAI-compatible server; give it again for more servers
    #[arg(long, num_args = 1.., value_name = "URL", conflicts_with = "local_model")]
    server: Vec<String>,
    /// Answer in this process with the model of this folder, GGUF file or hub id, without a server
    #[arg(long, value_name = "M")]
    local_model: Option<String>,
    #[command(flatten)]
    asking: Options,
    #[command(flatten)]
    sampling: Sampling,
    #[command(flatten)]
    states: StatesArgs,
    /// Take over the answers of an earlier output of the same model and settings, where id and prompt are the same
    #[arg(long, num_args = 1.., value_name = "F")]
    reuse: Vec<PathBuf>,
    /// Answer the share of worker i of n, from 0: the rows whose ids fall to it. Each worker has an --output of its own
    #[arg(long, value_name = "I/N", value_parser = parse_worker, default_value = "0/1", hide_default_value = true)]
    worker: Worker,
    /// Show the first requests and send none
    #[arg(long)]
    dry_run: bool,
    /// Ask again for rows that failed in an earlier run
    #[arg(long)]
    retry_failed: bool,
    /// Start anew where an output exists
    #[arg(long)]
    overwrite: bool,
    #[command(flatten, next_help_heading = "With --local-model")]
    engine: EngineArgs,
}

impl Args {
    /// The model's name.
    fn model(&self) -> &str {
        self.model.as_deref().or(self.local_model.as_deref()).unwrap_or_default()
    }
}

/// Runs the command.
///
/// # Errors
/// Exits with code 2 on a usage error. Exits with code 1 if rows failed or were malformed, if no
/// backend answers, or if a file cannot be read or written. Also exits with code 1 if rows stay
/// pending because the inputs changed. Exits with code 75 if a signal stopped the run.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    check(args)?;
    let inputs = Inputs::open(args, verbosity)?;
    if args.dry_run {
        return dry_run(args, &inputs);
    }
    let (mut store, mut stats) = inputs.resume(args)?;
    let (ending, backend) = match store.pending() {
        0 => (Ending::Finished, None),
        _ => inputs.ask(args, verbosity, &mut store, &mut stats)?,
    };
    store.sync()?;
    stats.write(&store, backend.as_deref())?;
    stats.print(&store, backend.as_deref())?;
    exit_result(ending, &store)
}

/// Everything that is read before the first request.
struct Inputs {
    /// The model in this process, with `--local-model`.
    embedded: Option<(PathBuf, EngineArgs)>,
    settings: Arc<RequestSettings>,
    index: Arc<InputIndex>,
}

impl Inputs {
    fn open(args: &Args, verbosity: Verbosity) -> anyhow::Result<Self> {
        let embedded = args.local_model.as_deref().filter(|_| !args.dry_run);
        let embedded =
            embedded.map(|model| args.engine.resolve("--local-model", model, verbosity)).transpose()?;
        let weights = embedded.as_ref().map(|(dir, _)| weights_digest(dir)).transpose()?;
        let settings = RequestSettings::new(&args.input, args.model(), weights, &args.sampling, args.worker)?;
        let settings = Arc::new(match args.states.stored() {
            Some(states) => settings.with_states(states)?,
            None => settings,
        });
        reuse::check(&args.reuse, &settings)?;
        let index = Arc::new(index::index_inputs(&args.input, &settings)?);
        // A worker's share of few rows may be empty.
        if index.ids.len() + index.rejected.len() == 0 && args.worker == Worker::ALONE {
            let inputs: Vec<String> = args.input.iter().map(|path| path.display().to_string()).collect();
            usage!("--input {}: there are no rows", inputs.join(" "));
        }
        Ok(Self { embedded, settings, index })
    }

    /// Opens the output, with the rows of earlier runs and of `--reuse`.
    fn resume(&self, args: &Args) -> anyhow::Result<(ResultStore, RunStats)> {
        let Self { settings, index, .. } = self;
        // Before --overwrite empties the output.
        if let Some(states) = &settings.states {
            with_states::open_folder(states, settings)?;
        }
        let mut store = ResultStore::open(&args.output, settings, Arc::clone(index), args.overwrite)?;
        if let Some(states) = &settings.states {
            with_states::check_answered(states, &store.done().ok)?;
        }
        rejected_rows::report(&index.rejected, &args.output)?;
        if args.retry_failed {
            store.forget_failed()?;
        }
        let mut stats = RunStats::new();
        if !args.reuse.is_empty() && store.pending() > 0 {
            stats.reused = reuse::reuse_answers(&args.reuse, &args.input, settings, &mut store)?;
            tracing::info!("{} taken over from earlier outputs", cli::count(stats.reused, "row"));
        }
        Ok((store, stats))
    }

    /// Answers the pending rows.
    fn ask(
        self,
        args: &Args,
        verbosity: Verbosity,
        store: &mut ResultStore,
        stats: &mut RunStats,
    ) -> anyhow::Result<(Ending, Option<Arc<Backend>>)> {
        let runtime = Runtime::new().context("starting the client's threads")?;
        let backend = Arc::new(open_backend(args, self.embedded)?);
        stats.start_clock();
        stats.concurrency = match &*backend {
            Backend::Servers(pool) => pool.capacity(),
            Backend::Embedded(_) => args.asking.concurrency,
        };
        let (total, pending) = (self.index.ids.len() as u64, store.pending() as u64);
        let work = Work {
            inputs: args.input.clone(),
            settings: self.settings,
            workers: concurrent_rows(&backend, args.asking.concurrency),
            backend: Arc::clone(&backend),
            store,
            stats,
            progress: Progress::new(verbosity, "rows", total, total - pending),
        };
        let ending = runtime.block_on(work.run())?;
        // Requests in progress must not delay the end of an interrupted run.
        runtime.shutdown_background();
        Ok((ending, Some(backend)))
    }
}

fn check(args: &Args) -> anyhow::Result<()> {
    args.asking.check()?;
    for input in &args.input {
        match input {
            _ if input.to_str().is_none() => usage!("--input {}: the path is not UTF-8", input.display()),
            _ if input.is_dir() => usage!("--input {} is a folder; name its files", input.display()),
            _ if !input.is_file() => usage!("--input {}: no such file", input.display()),
            _ => {
                if let Err(problem) = jsonl::check_is_json_lines(input) {
                    usage!("--input {problem}");
                }
            }
        }
    }
    let extension = args.output.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    if matches!(extension, "gz" | "zst") {
        usage!("--output {}: rows are appended one by one and not compressed", args.output.display());
    }
    // Compares files rather than path names, because `--overwrite` empties or removes the outputs.
    for written in store::output_files(&args.output) {
        for read in args.input.iter().chain(&args.reuse) {
            if same_file::is_same_file(&written, read) {
                usage!(
                    "--output {}: it would replace {}, which is read",
                    args.output.display(),
                    read.display()
                );
            }
        }
    }
    pool::check_urls(&args.server)
}

/// Loads the model in this process, or sets up the HTTP client of the servers.
fn open_backend(args: &Args, embedded: Option<(PathBuf, EngineArgs)>) -> anyhow::Result<Backend> {
    if let Some((dir, engine)) = embedded {
        let model = Box::new(ChatModel::load(&dir, &engine)?);
        return Ok(Backend::Embedded(Embedded {
            model,
            name: args.model().into(),
            in_flight: AtomicUsize::new(0),
        }));
    }
    let asking = Options {
        sets_thinking: args.sampling.sets_thinking(),
        states_folder: args.states.servers_folder(),
        ..args.asking.clone()
    };
    Ok(Backend::Servers(Arc::new(Pool::new(&args.server, asking)?)))
}

/// Number of rows in progress. There are more rows in progress than server slots, so that no slot waits for a row.
fn concurrent_rows(backend: &Backend, concurrency: usize) -> usize {
    match backend {
        Backend::Servers(pool) => 2 * pool.capacity(),
        Backend::Embedded(_) => concurrency,
    }
}

/// Prints the plan of a run and its first requests, without sending or writing anything.
fn dry_run(args: &Args, inputs: &Inputs) -> anyhow::Result<()> {
    let (settings, index) = (&*inputs.settings, &*inputs.index);
    let mut done = if args.overwrite {
        FinishedRows::default()
    } else {
        FinishedRows::read(&args.output, settings, index)?
    };
    if args.retry_failed {
        done.failed.clear();
    }
    let wanted = |id: &str| index.ids.contains(id) && done.is_pending(id);
    let (mut reused, mut taken, ok, failed) = (0, IdSet::default(), done.ok.len(), done.failed.len());
    if !args.reuse.is_empty() {
        let mut earlier = reuse::EarlierAnswers::read(&args.reuse)?;
        reused = earlier.take(&args.input, settings, wanted, |id, _| {
            taken.insert(id);
            Ok(())
        })?;
    }
    let (mut first, mut asked, mut requests): (Vec<Value>, usize, u64) = (vec![], 0, 0);
    for row in index::select_rows(&args.input, settings, |id| wanted(id) && !taken.contains(id)) {
        let row = row?;
        (asked, requests) = (asked + 1, requests + row.answer_count() as u64);
        if first.len() < MAX_SHOWN_REQUESTS {
            let (id, turns) = (&row.id, row.answer_count());
            first.push(json!({"id": id, "requests": turns, "first": row.first_request(settings)}));
        }
    }
    let (rows, malformed) = (ok + failed + reused + asked, index.rejected.len());
    let mut out = cli::stdout();
    writeln!(
        out,
        "{rows} rows = {ok} ok + {failed} failed + {reused} to take over + {asked} to ask ({requests} requests); {malformed} \
         malformed lines"
    )?;
    first.iter().try_for_each(|request| writeln!(out, "{request:#}"))?;
    Ok(writeln!(out, "nothing was asked and {} was not touched", args.output.display())?)
}

/// The error of the first failed row.
fn first_problem(failed: &Path) -> Option<String> {
    let rows = BufReader::new(File::open(failed).ok()?);
    let row: Value = serde_json::from_str(&rows.lines().next()?.ok()?).ok()?;
    Some(row["error"].as_str()?.to_string())
}

/// Converts the end of the run into an exit code.
fn exit_result(ending: Ending, store: &ResultStore) -> anyhow::Result<()> {
    let (malformed, failed, pending) =
        (store.index.rejected.len(), store.done().failed.len(), store.pending());
    match ending {
        Ending::Broken(error) => Err(error),
        Ending::Interrupted => {
            let reason = format!("stopped with {pending} rows pending; the same command goes on with them");
            Err(ExitWith { code: TRY_AGAIN_EXIT_CODE, reason }.into())
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
                let path = store.failed_path();
                let first = first_problem(path).map_or_else(String::new, |why| format!(", the first: {why}"));
                reasons.push(format!("{failed} rows failed (see {}{first})", path.display()));
            }
            if malformed > 0 {
                let rejects = rejected_rows::rejects_path(store.output());
                reasons.push(format!("{malformed} lines were malformed (see {})", rejects.display()));
            }
            Err(ExitWith { code: 1, reason: reasons.join(", ") }.into())
        }
        Ending::Finished => Ok(()),
    }
}
