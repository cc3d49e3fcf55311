//! `load`: sends requests to servers as many users would, and measures throughput and latencies.

mod client;
mod events;
mod render;
mod summary;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use deepspec_core::cli::{ExitWith, Verbosity};
use deepspec_core::{atomic, usage};
use deepspec_datasets::suites::SuiteDir;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

pub use events::SseParser;

use client::{Arrivals, Client, Prompt, RequestOptions};
use summary::LoadSummary;

/// Format name in load.json.
pub const LOAD_FORMAT: &str = "deepspec-load";
/// Format version in load.json.
pub const LOAD_FORMAT_VERSION: u64 = 1;
/// Share of failed requests above which a run counts as failed.
const MAX_FAILED_SHARE: f64 = 0.05;

/// Arguments of `load`. The API key of the server is read from OPENAI_API_KEY.
#[derive(clap::Args)]
pub struct Args {
    /// Server that speaks the OpenAI API, with a name for it in front where there are several: plain=http://127.0.0.1:30000
    #[arg(long = "server", value_name = "[NAME=]URL", required = true)]
    servers: Vec<Server>,
    /// The model's name there; without it the first that the server lists
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Suite whose prompts are sent; may be repeated
    #[arg(long = "suite", value_name = "NAME", required = true)]
    suites: Vec<String>,
    /// Folder of the suites' files
    #[arg(long, value_name = "DIR", default_value = "eval_datasets")]
    suites_dir: PathBuf,
    /// Users who each send a request as soon as the last one is answered, by commas: one run each
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 4, 16], conflicts_with = "rate")]
    concurrency: Vec<usize>,
    /// Requests per second of Poisson arrivals, which wait for no answers, by commas: one run each
    #[arg(long, value_name = "R", value_delimiter = ',')]
    rate: Vec<f64>,
    /// Measured seconds of each run
    #[arg(long, value_name = "S", default_value_t = 30.0)]
    seconds: f64,
    /// Seconds of warm-up before them, which are not measured
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    warm_up: f64,
    /// Tokens of an answer at most
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_new_tokens: u32,
    /// Divides the logits; 0 always takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f64,
    /// Value of the chat template's `enable_thinking`; `unsaid` sends no `chat_template_kwargs`, for servers that do not
    /// know the field
    #[arg(long, value_enum, default_value_t = Thinking::Off)]
    thinking: Thinking,
    /// Folder for load.json, requests.parquet, report.html and plots
    #[arg(long, value_name = "D")]
    output_dir: PathBuf,
    /// Replace what exists
    #[arg(long)]
    overwrite: bool,
    /// Print load.json instead of a table
    #[arg(long)]
    json: bool,
}

/// Value of `enable_thinking` in requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Thinking {
    /// `enable_thinking: true`.
    On,
    /// `enable_thinking: false`.
    Off,
    /// No `chat_template_kwargs`.
    Unsaid,
}

/// A server with its name in tables.
#[derive(Debug, Clone)]
struct Server {
    name: String,
    url: String,
}

impl FromStr for Server {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, url) = match text.split_once('=') {
            Some((name, url)) if !name.contains('/') => (name, url),
            _ => ("server", text),
        };
        if !(url.starts_with("http://") || url.starts_with("https://")) {
            return Err(
                "expected an address such as http://127.0.0.1:30000, with NAME= before it or without".into(),
            );
        }
        let url = url.trim_end_matches('/').trim_end_matches("/v1").to_string();
        Ok(Self { name: name.into(), url })
    }
}

/// Load of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Number of users with one request in flight each.
    Concurrency(usize),
    /// Requests per second.
    Rate(f64),
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Concurrency(users) => write!(f, "{users}"),
            Self::Rate(rate) => write!(f, "{rate}/s"),
        }
    }
}

/// Contents of load.json.
#[derive(Serialize)]
pub struct LoadReport {
    format: &'static str,
    format_version: u64,
    tool_version: &'static str,
    suites: Vec<String>,
    seconds: f64,
    warm_up: f64,
    max_new_tokens: u32,
    temperature: f64,
    /// One summary per run, ordered by server and then by level.
    pub runs: Vec<LoadSummary>,
}

/// Runs the command.
///
/// # Errors
/// Usage errors, a server that cannot be reached or fails every request, and outputs that cannot be
/// written.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    let file = args.output_dir.join("load.json");
    let others = ["report.md", "report.html", "requests.parquet"];
    let levels = args.levels()?;
    if !args.overwrite && args.is_measured(&file, &levels) {
        tracing::info!("{} is complete; nothing to do (--overwrite measures anew)", file.display());
        return Ok(());
    }
    crate::output::check_fresh(&args.output_dir, "load.json", &others, args.overwrite)?;
    let folder = SuiteDir::open(&args.suites_dir)?;
    let mut prompts = vec![];
    for suite in folder.select(&args.suites, &[])? {
        let name = suite.name.to_string();
        let rows = folder.load(suite, 0, None)?;
        let prompt = |sample: deepspec_datasets::suites::Sample| {
            let text = sample.turns.into_iter().next().unwrap_or_default();
            Prompt { suite: name.clone(), sample: sample.id, text }
        };
        prompts.push(rows.samples.into_iter().map(prompt).collect());
    }
    let prompts = Arc::new(interleave_suites(prompts));
    atomic::create_dir(&args.output_dir)?;
    let runtime = Runtime::new().context("starting threads")?;
    let (mut runs, mut requests) = (vec![], vec![]);
    let asking = RequestOptions {
        max_tokens: args.max_new_tokens,
        temperature: args.temperature,
        thinking: match args.thinking {
            Thinking::On => Some(true),
            Thinking::Off => Some(false),
            Thinking::Unsaid => None,
        },
    };
    // Connect to all servers before the first measurement.
    let connect = |server: &Server| Client::connect(&runtime, &server.url, args.model.as_deref(), asking);
    let clients = args.servers.iter().map(connect).collect::<anyhow::Result<Vec<_>>>()?;
    let mut all_failed = None;
    for (server, client) in args.servers.iter().zip(&clients) {
        for &level in &levels {
            let arrivals = Arrivals {
                level,
                warm_up: Duration::from_secs_f64(args.warm_up),
                seconds: Duration::from_secs_f64(args.seconds),
            };
            let asked = runtime.block_on(client.send_requests(Arc::clone(&prompts), arrivals));
            let summary = LoadSummary::new(&server.name, level, arrivals, &asked);
            if verbosity != Verbosity::Quiet {
                tracing::info!("{}", summary.line());
            }
            if let Some(problem) = summary.all_failed_reason(&asked) {
                tracing::warn!("{} at {level}: no request was answered: {problem}", server.name);
                all_failed = Some(format!("{}: no request was answered: {problem}", server.url));
            }
            requests.extend(asked.into_iter().map(|request| (server.name.clone(), level, request)));
            runs.push(summary);
        }
    }
    if let Some(problem) = all_failed.filter(|_| runs.iter().all(|run| run.requests == run.failed)) {
        anyhow::bail!(problem);
    }
    let report = LoadReport {
        format: LOAD_FORMAT,
        format_version: LOAD_FORMAT_VERSION,
        tool_version: deepspec_core::VERSION,
        suites: args.suites.clone(),
        seconds: args.seconds,
        warm_up: args.warm_up,
        max_new_tokens: args.max_new_tokens,
        temperature: args.temperature,
        runs,
    };
    for run in report.runs.iter().filter(|run| run.tokens_are_pieces > 0) {
        tracing::warn!(
            "{} at {}: {} answers came without token counts (`usage`); their pieces of text are counted as tokens",
            run.server,
            run.level,
            run.tokens_are_pieces
        );
    }
    render::write_requests(&args.output_dir, &requests)?;
    render::write_report(&args.output_dir, &report)?;
    atomic::write_json(&file, &report)?;
    let text = if args.json {
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        render::table(&report).render()
    };
    crate::output::print(&text)?;
    fail_if_many_failed(&report)
}

/// Returns exit code 1 with the reasons if more than [`MAX_FAILED_SHARE`] of a run's requests
/// failed.
fn fail_if_many_failed(report: &LoadReport) -> anyhow::Result<()> {
    let has_failed = |run: &&LoadSummary| run.failed as f64 > MAX_FAILED_SHARE * run.requests as f64;
    let runs: Vec<&LoadSummary> = report.runs.iter().filter(has_failed).collect();
    if runs.is_empty() {
        return Ok(());
    }
    let sum = |of: fn(&LoadSummary) -> usize| runs.iter().map(|run| of(run)).sum::<usize>();
    let (requests, failed) = (sum(|run| run.requests), sum(|run| run.failed));
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for (reason, count) in runs.iter().flat_map(|run| &run.problems) {
        *reasons.entry(reason).or_default() += count;
    }
    let mut reasons: Vec<_> = reasons.into_iter().collect();
    reasons.sort_by_key(|(_, count)| Reverse(*count));
    let shown =
        reasons.iter().take(3).map(|(reason, count)| format!("{count} × {reason}")).collect::<Vec<_>>();
    let names: Vec<String> = runs.iter().map(|run| format!("{} at {}", run.server, run.level)).collect();
    let reason = format!(
        "{}: {failed} of {requests} requests failed, so the figures are not those of a working server: {}; all reasons are in requests.parquet",
        names.join(", "),
        shown.join("; ")
    );
    Err(ExitWith { code: 1, reason }.into())
}

impl Args {
    /// Whether `file` has this measurement: the same suites, limits and servers at the same levels,
    /// with few failures.
    fn is_measured(&self, file: &Path, levels: &[Level]) -> bool {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let kept: Value = serde_json::from_str(&text).unwrap_or_default();
        let asked = json!({
            "suites": self.suites,
            "seconds": self.seconds,
            "warm_up": self.warm_up,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
        });
        let runs: Vec<(Value, Value)> = self
            .servers
            .iter()
            .flat_map(|server| levels.iter().map(|level| (json!(server.name), json!(level))))
            .collect();
        let measured = kept["runs"].as_array().is_some_and(|kept| {
            let few = |run: &Value| {
                run["failed"].as_f64().unwrap_or(1.0)
                    <= MAX_FAILED_SHARE * run["requests"].as_f64().unwrap_or(0.0)
            };
            kept.len() == runs.len()
                && kept
                    .iter()
                    .zip(&runs)
                    .all(|(run, asked)| (&run["server"], &run["level"]) == (&asked.0, &asked.1) && few(run))
        });
        measured
            && asked.as_object().is_some_and(|asked| asked.iter().all(|(key, value)| kept[key] == *value))
    }

    fn levels(&self) -> anyhow::Result<Vec<Level>> {
        // A day at most, so that adding times cannot overflow.
        let lasts = |seconds: f64| (0.0..=86_400.0).contains(&seconds);
        if !lasts(self.seconds) || self.seconds == 0.0 || !lasts(self.warm_up) {
            usage!("--seconds must be positive, --warm-up at least 0, and both a day (86400) at most");
        }
        if self.max_new_tokens == 0 || self.concurrency.contains(&0) {
            usage!("--max-new-tokens and --concurrency must be at least 1");
        }
        if let Some(rate) = self.rate.iter().find(|rate| !(1e-4..=1e6).contains(*rate)) {
            usage!("--rate {rate}: expected between 0.0001 and 1000000 requests per second");
        }
        if let Some((i, server)) = self
            .servers
            .iter()
            .enumerate()
            .find(|(i, server)| self.servers[..*i].iter().any(|other| other.name == server.name))
        {
            usage!("--server {} is given twice; name each: --server NAME{i}={}", server.name, server.url);
        }
        Ok(match self.rate.is_empty() {
            true => self.concurrency.iter().map(|&users| Level::Concurrency(users)).collect(),
            false => self.rate.iter().map(|&rate| Level::Rate(rate)).collect(),
        })
    }
}

/// Takes one prompt of each suite in turn, until all are used. A shorter suite ends earlier.
fn interleave_suites(suites: Vec<Vec<Prompt>>) -> Vec<Prompt> {
    let mut queues: Vec<_> = suites.into_iter().map(Vec::into_iter).collect();
    let mut prompts = vec![];
    loop {
        let before = prompts.len();
        prompts.extend(queues.iter_mut().filter_map(Iterator::next));
        if prompts.len() == before {
            return prompts;
        }
    }
}
