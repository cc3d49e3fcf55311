//! `cache plan`: estimates the size and duration of a build.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use deepspec_capture::cache::{Encoding, FinalStates, Plan, PlannedSample, stored_bytes};
use deepspec_capture::{
    Capture, ForwardLimits, StatesError, TargetSpec, TokenisedRows, split_into_batches, tokenise,
};
use deepspec_core::cli::{self, UsageError, Verbosity, count};
use deepspec_core::usage;
use deepspec_cost::estimate::{Machine, MeasuredWork, Stage, Work, capture_work, read_measured};
use deepspec_drafters::Recipe;
use deepspec_models::ModelConfig;
use serde_json::{Value, json};
use tch::Device;

use super::build::{describe_row_counts, free_space};
use super::{Job, mib};

/// Longest run of a trial after the target is loaded.
const MAX_TRIAL_TIME: Duration = Duration::from_secs(20);

/// Arguments of `cache plan`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    job: Job,
    /// Tokens that the target processes per second, to estimate how long a build runs
    #[arg(long, value_name = "TOKENS_PER_S", conflicts_with = "measure")]
    rate: Option<f64>,
    /// Estimate how long a build runs on an accelerator: b200, h200, h100, a100, mi300x or l40s, or a file (.yaml) that describes one
    #[arg(long, value_name = "NAME|FILE", conflicts_with_all = ["rate", "measure"])]
    hardware: Option<String>,
    /// Estimate the duration from measurements of such a device, by `cache plan --measure --json`; may be repeated
    #[arg(long, value_name = "FILE", conflicts_with_all = ["rate", "measure"])]
    measured: Vec<PathBuf>,
    /// Devices that share the build, for --hardware and --measured
    #[arg(long, value_name = "N", default_value_t = 1)]
    devices: usize,
    /// Load the target and run it for some seconds, to measure its speed and how well its states compress
    #[arg(long)]
    measure: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// An encoding and choice of final states, with the size of the cache.
struct LayoutChoice {
    encoding: Encoding,
    last: FinalStates,
    shards: usize,
    /// Bytes of all files; an upper limit if the encoding compresses.
    bytes: u64,
    /// Expected bytes if the encoding compresses, extrapolated from a trial.
    estimate: Option<u64>,
}

/// Measurements of a short run of the target.
struct Trial {
    tokens_per_s: f64,
    /// Compressed size as a fraction of the bfloat16 size.
    compressed: f64,
    /// FLOPs and bytes of the run, and its duration.
    work: MeasuredWork,
}

/// Runs the command.
///
/// # Errors
/// With a usage error, or if a file cannot be read or a trial fails.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    if args.rate.is_some_and(|rate| !(rate > 0.0 && rate.is_finite())) {
        usage!("--rate must be a number of tokens per second above 0");
    }
    let (recipe, dir) = args.job.open()?;
    let source = TargetSpec::open(&recipe, verbosity).map_err(StatesError::report)?;
    let TokenisedRows { samples, report } = tokenise(&args.job.input, &source, |_| ())?;
    if samples.is_empty() {
        anyhow::bail!("no row can be used: {}", describe_row_counts(&report, &recipe).replace('\n', "; "));
    }
    if recipe.data.states.come_from_engine()
        && (args.measure || args.hardware.is_some() || !args.measured.is_empty())
    {
        usage!("an engine computes these states, and its speed is not estimated; give --rate TOKENS_PER_S");
    }
    let trial = args.measure.then(|| run_trial(args, &recipe, &source, &samples)).transpose()?;
    let foretold = predict_seconds(args, &source, &samples)?;
    let tokens = report.tokens as f64;
    let rate = trial.as_ref().map_or(args.rate, |trial| Some(trial.tokens_per_s));
    let rate = rate.or(foretold.map(|seconds| tokens / seconds));
    let work = trial.as_ref().map(|trial| [trial.work]);
    let choices = list_choices(args, samples, &source, trial.map(|trial| trial.compressed))?;
    let (seconds, free) = (rate.map(|rate| tokens / rate), free_space(&dir)?);
    if args.json {
        let shown: Vec<Value> = choices
            .iter()
            .map(|LayoutChoice { encoding, last, shards, bytes, estimate }| {
                json!({
                    "encoding": encoding, "last": last, "shards": shards, "bytes": bytes, "fits": *bytes <= free,
                    "exact": !encoding.compresses(), "estimate": estimate,
                })
            })
            .collect();
        let rows = json!({
            "read": report.read, "kept": report.kept, "failed": report.failed, "too_short": report.too_short,
            "rejected": report.rejected.len(), "cut": report.cut,
        });
        let plan = json!({
            "tool_version": deepspec_core::VERSION, "rows": rows, "tokens": report.tokens, "supervised_tokens": report.supervised_tokens,
            "choices": shown, "free_bytes": free, "tokens_per_s": rate, "seconds": seconds, "work": work,
        });
        return Ok(writeln!(cli::stdout(), "{}", serde_json::to_string_pretty(&plan)?)?);
    }
    let mut lines = vec![describe_row_counts(&report, &recipe)];
    for rejected in report.rejected.iter().take(5) {
        lines.push(format!(
            "rejected    {}, line {}: {}",
            rejected.file.display(),
            rejected.line,
            rejected.reason
        ));
    }
    for LayoutChoice { encoding, last, shards, bytes, estimate } in &choices {
        let fits = if *bytes <= free { "" } else { ", more than is free" };
        let about = match estimate {
            Some(bytes) => format!(" at most, about {} by the trial", mib(*bytes)),
            None if encoding.compresses() => " at most, two thirds of it as a rule".to_string(),
            None => String::new(),
        };
        let name = encoding.to_string();
        lines.push(format!(
            "{name:<11} last {last:<10} {:>14} in {}{about}{fits}",
            mib(*bytes),
            count(*shards, "shard")
        ));
    }
    lines.push(format!("free        {} at {}", mib(free), dir.display()));
    lines.push(match (rate, seconds) {
        (Some(rate), Some(seconds)) => {
            let how = match (args.measure, foretold) {
                (true, _) => "measured",
                (false, Some(_)) => "foretold",
                (false, None) => "given",
            };
            let devices = match (foretold, args.devices) {
                (None, _) | (_, 1) => "one device".to_string(),
                (Some(_), devices) => format!("{devices} devices"),
            };
            format!("time        {} at {rate:.0} tokens/s ({how}) on {devices}", format_duration(seconds))
        }
        _ => "time        unknown: give --rate TOKENS_PER_S, --hardware NAME, or --measure".to_string(),
    });
    let wrapped = lines.iter().flat_map(|line| line.lines()).map(|line| {
        // A one-word label, padded to column 12.
        let label =
            line.get(..12).map(str::trim_end).filter(|label| label.len() < 12 && !label.contains(' '));
        label.map_or_else(
            || cli::wrap_paragraph("", 0, line),
            |label| cli::wrap_paragraph(label, 12, &line[12..]),
        )
    });
    Ok(writeln!(cli::stdout(), "{}", wrapped.collect::<Vec<_>>().join("\n"))?)
}

/// All encodings and choices of final states for the samples.
fn list_choices(
    args: &Args,
    samples: Vec<PlannedSample>,
    source: &TargetSpec,
    compressed: Option<f64>,
) -> anyhow::Result<Vec<LayoutChoice>> {
    let shard_bytes = args.job.shard_bytes();
    let mut plan = Plan::new(samples, source.layout(source.final_states, Encoding::Bf16), shard_bytes)?;
    let mut choices = Vec::new();
    for encoding in Encoding::ALL {
        for last in [FinalStates::Supervised, FinalStates::All]
            .into_iter()
            .filter(|last| last.covers(source.final_states))
        {
            plan = plan.in_layout(source.layout(last, encoding))?;
            let (shards, bytes) = (plan.shards().len(), plan.cache_bytes(&source.identity)?);
            let saved =
                compressed.filter(|_| encoding.compresses()).map(|part| (1.0 - part) * plan.bytes() as f64);
            let estimate = saved.map(|saved| bytes.saturating_sub(saved as u64));
            choices.push(LayoutChoice { encoding, last, shards, bytes, estimate });
        }
    }
    Ok(choices)
}

/// Predicted seconds of the build on the given devices. None if no device is given.
fn predict_seconds(
    args: &Args,
    source: &TargetSpec,
    samples: &[PlannedSample],
) -> anyhow::Result<Option<f64>> {
    if args.devices == 0 {
        usage!("--devices must be at least 1");
    }
    if args.hardware.is_none() && args.measured.is_empty() {
        if args.devices != 1 {
            usage!("--devices needs --hardware or --measured, which say how fast they are");
        }
        return Ok(None);
    }
    let target = &source.config;
    let device =
        deepspec_ops::parse_device(&args.job.device).map_err(|error| UsageError(error.to_string()))?;
    // The specifications of accelerators are for bfloat16.
    let (device, value_bytes) = match args.hardware {
        Some(_) => (Device::Cuda(0), 2.0),
        None => (device, deepspec_ops::default_dtype(device).elt_size_in_bytes() as f64),
    };
    let machine = Machine::from_measurements(args.hardware.as_deref(), &args.measured, |file| {
        read_measured(file, &target.model_size(), None, value_bytes)
    });
    let machine = machine.map_err(|error| UsageError(error.to_string()))?;
    let Some((rates, _)) = machine.rates(Stage::States) else {
        usage!("--measured: none of the files is of states; `cache plan --measure --json` writes one");
    };
    let longest = samples.iter().map(|sample| sample.input_ids.len()).max().unwrap_or(0);
    let runs = split_into_batches(
        samples.iter().map(|sample| sample.input_ids.len()),
        ForwardLimits::new(longest, device),
    );
    let work = capture_flops_and_bytes(target, samples, runs.len(), value_bytes);
    Ok(Some(rates.seconds(work) / args.devices as f64))
}

/// The FLOPs and bytes of capturing these samples in `forwards` forward passes.
fn capture_flops_and_bytes(
    target: &ModelConfig,
    samples: &[PlannedSample],
    forwards: usize,
    value_bytes: f64,
) -> Work {
    let lengths = samples.iter().map(|sample| (1.0, sample.input_ids.len() as f64));
    capture_work(&target.model_size(), lengths, forwards as f64, value_bytes)
}

/// Runs the target on the first samples. The clock starts after the first forward pass, whose
/// states measure the compression.
fn run_trial(
    args: &Args,
    recipe: &Recipe,
    source: &TargetSpec,
    samples: &[PlannedSample],
) -> anyhow::Result<Trial> {
    let device =
        deepspec_ops::parse_device(&args.job.device).map_err(|error| UsageError(error.to_string()))?;
    let kind = deepspec_ops::default_dtype(device);
    let longest = samples.iter().map(|sample| sample.input_ids.len()).max().unwrap_or(0);
    let mut capture = Capture::load(&source.dir, recipe, longest, device, kind)?;
    let runs =
        split_into_batches(samples.iter().map(|sample| sample.input_ids.len()), capture.forward_limits());
    let [plain, compressed] =
        [Encoding::Bf16, Encoding::Bf16z].map(|encoding| source.layout(FinalStates::All, encoding));
    let (mut done, mut forwards, mut started, mut bytes) = (0, 0, Instant::now(), [0, 0]);
    for run in runs {
        done = run.end;
        let batch = &samples[run];
        if forwards == 0 {
            let captured = capture.run(batch, FinalStates::All);
            let [taps, last] = capture.download(captured).bytes();
            bytes = [stored_bytes(&plain, &taps, &last)?, stored_bytes(&compressed, &taps, &last)?];
            // The first batch runs twice, so that a build of a single batch is measured too.
            started = Instant::now();
        }
        // Reading a value waits for the device.
        capture.run(batch, FinalStates::All).last.sum(None).double_value(&[]);
        forwards += 1;
        if started.elapsed() > MAX_TRIAL_TIME {
            break;
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let samples = &samples[..done];
    let tokens: usize = samples.iter().map(|sample| sample.input_ids.len()).sum();
    let value_bytes = kind.elt_size_in_bytes() as f64;
    let work = capture_flops_and_bytes(&source.config, samples, forwards, value_bytes);
    Ok(Trial {
        tokens_per_s: tokens as f64 / seconds,
        compressed: bytes[1] as f64 / bytes[0] as f64,
        work: MeasuredWork { stage: Stage::States, work, seconds },
    })
}

fn format_duration(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
