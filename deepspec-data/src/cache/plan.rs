//! `cache plan`: what a build would write, before anything runs.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use deepspec_cache::{Encoding, Last, Plan, PlannedSample};
use deepspec_core::cli::{UsageError, Verbosity};
use deepspec_core::recipe::Recipe;
use deepspec_core::usage;
use deepspec_states::{Capture, Source, StatesError, Tokenised, batches, tokenise};
use serde_json::{Value, json};

use super::build::{accounts, free_space};
use super::mib;

/// How long a trial runs at most, once the target is loaded.
const TRIAL: Duration = Duration::from_secs(20);

/// What would be captured, and where to.
#[derive(clap::Args)]
pub struct Args {
    /// Recipe of the run; its target and data decide the states
    #[arg(long, value_name = "C")]
    config: PathBuf,
    /// Override a value of the recipe, as in data.max_length=2048
    #[arg(long, value_name = "K=V")]
    set: Vec<String>,
    /// JSONL rows with `id` and `conversations`
    #[arg(long, required = true, num_args = 1.., value_name = "F")]
    input: Vec<PathBuf>,
    /// Folder that the cache would be written to, by default the recipe's
    #[arg(long, value_name = "D")]
    output_dir: Option<PathBuf>,
    /// Hidden states per shard file, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    shard_size: u32,
    /// Tokens that the target takes in per second, to say how long a build runs
    #[arg(long, value_name = "TOKENS_PER_S", conflicts_with = "measure")]
    rate: Option<f64>,
    /// Load the target and run it for some seconds to learn that
    #[arg(long)]
    measure: bool,
    /// Where the trial runs: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A way to store the states, and what it takes.
struct Choice {
    encoding: Encoding,
    last: Last,
    shards: usize,
    bytes: u64,
}

/// Runs the command.
///
/// # Errors
/// Usage errors, unreadable files, and a trial that fails.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    if let Some(missing) = args.input.iter().find(|input| !input.is_file()) {
        usage!("--input {}: no such file", missing.display());
    }
    if args.shard_size == 0 {
        usage!("--shard-size must be at least 1");
    }
    if args.rate.is_some_and(|rate| !(rate > 0.0 && rate.is_finite())) {
        usage!("--rate must be a number of tokens per second above 0");
    }
    let recipe = Recipe::load(&args.config, &args.set)?;
    let Some(dir) = args.output_dir.clone().or_else(|| recipe.cache_dir()) else {
        usage!("--output-dir is missing, and {} names no cache (data.states)", args.config.display());
    };
    let source = Source::open(&recipe, verbosity).map_err(StatesError::report)?;
    let Tokenised { samples, report } = tokenise(&args.input, &source, |_| ())?;
    if samples.is_empty() {
        anyhow::bail!("no row can be used: {}", accounts(&report, &recipe).replace('\n', "; "));
    }
    let rate = if args.measure { Some(measured(args, &recipe, &source, &samples)?) } else { args.rate };
    let choices = choices(args, samples, &source)?;
    let (seconds, free) = (rate.map(|rate| report.tokens as f64 / rate), free_space(&dir)?);
    if args.json {
        let shown: Vec<Value> = choices
            .iter()
            .map(|Choice { encoding, last, shards, bytes }| {
                json!({"encoding": encoding, "last": last, "shards": shards, "bytes": bytes, "fits": *bytes <= free})
            })
            .collect();
        let rows = json!({
            "read": report.read, "kept": report.kept, "failed": report.failed, "too_short": report.too_short,
            "rejected": report.rejected.len(), "cut": report.cut,
        });
        let plan = json!({
            "rows": rows, "tokens": report.tokens, "supervised_tokens": report.supervised_tokens,
            "choices": shown, "free_bytes": free, "tokens_per_s": rate, "seconds": seconds,
        });
        return Ok(writeln!(io::stdout(), "{}", serde_json::to_string_pretty(&plan)?)?);
    }
    let mut lines = vec![accounts(&report, &recipe)];
    for rejected in report.rejected.iter().take(5) {
        lines.push(format!(
            "rejected    {}, line {}: {}",
            rejected.file.display(),
            rejected.line,
            rejected.reason
        ));
    }
    for Choice { encoding, last, shards, bytes } in &choices {
        let fits = if *bytes <= free { "" } else { ", more than is free" };
        lines.push(format!("{encoding:<11} last {last:<10} {:>14} in {shards} shards{fits}", mib(*bytes)));
    }
    lines.push(format!("free        {} at {}", mib(free), dir.display()));
    lines.push(match (rate, seconds) {
        (Some(rate), Some(seconds)) => {
            let how = if args.measure { "measured" } else { "given" };
            format!("time        {} at {rate:.0} tokens/s ({how}) on one device", duration(seconds))
        }
        _ => "time        unknown: give --rate TOKENS_PER_S, or --measure".to_string(),
    });
    Ok(writeln!(io::stdout(), "{}", lines.join("\n"))?)
}

/// All ways to store the samples.
fn choices(args: &Args, samples: Vec<PlannedSample>, source: &Source) -> anyhow::Result<Vec<Choice>> {
    let shard_bytes = u64::from(args.shard_size) << 20;
    let mut plan = Plan::new(samples, source.layout(Last::Supervised, Encoding::Bf16), shard_bytes)?;
    let mut choices = Vec::new();
    for encoding in [Encoding::Bf16, Encoding::Fp8] {
        for last in [Last::Supervised, Last::All] {
            plan = plan.in_layout(source.layout(last, encoding))?;
            let (shards, bytes) = (plan.shards().len(), plan.cache_bytes(&source.identity)?);
            choices.push(Choice { encoding, last, shards, bytes });
        }
    }
    Ok(choices)
}

/// Tokens per second of the target on the first samples, the first forward left out.
fn measured(args: &Args, recipe: &Recipe, source: &Source, samples: &[PlannedSample]) -> anyhow::Result<f64> {
    let device = deepspec_dist::device(&args.device).map_err(|error| UsageError(error.to_string()))?;
    let kind = deepspec_dist::default_kind(device);
    let longest = samples.iter().map(|sample| sample.input_ids.len()).max().unwrap_or(0);
    let mut capture = Capture::load(&source.dir, recipe, longest, device, kind)?;
    let runs = batches(samples.iter().map(|sample| sample.input_ids.len()), capture.budget());
    let (mut tokens, mut started) = (0, Instant::now());
    for (index, run) in runs.into_iter().enumerate() {
        let batch = &samples[run];
        // Reading a value back waits for the device.
        let states = capture.run(batch, Last::All);
        states.last.sum(None).double_value(&[]);
        if index == 0 {
            started = Instant::now();
            // A lone batch is measured by a second run.
            let states = capture.run(batch, Last::All);
            states.last.sum(None).double_value(&[]);
        }
        tokens += batch.iter().map(|sample| sample.input_ids.len()).sum::<usize>();
        if started.elapsed() > TRIAL {
            break;
        }
    }
    Ok(tokens as f64 / started.elapsed().as_secs_f64())
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
