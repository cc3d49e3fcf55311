//! `simulate`: estimates the throughput of schedules by load, from a recorded run and a cost curve.

mod emit;
mod host;
mod recording;
mod render;
mod replay;
mod served;

use std::path::PathBuf;
use std::sync::Arc;

use deepspec_core::cli::Verbosity;
use deepspec_core::progress::Progress;
use deepspec_core::{atomic, usage};
use deepspec_cost::ScheduleError;
use deepspec_cost::cost::StepCost;
use deepspec_cost::cost_file::{self, WeightDigests};
use deepspec_cost::policy::Policy;
use deepspec_cost::temperatures::Temperatures;
use rayon::prelude::*;
use serde::Serialize;

use crate::explorer::{EXPLORER_FILE, Explorer, ExplorerPoints};
use crate::results::Results;
use host::HostOverhead;
use recording::Recording;
use replay::{Replay, ReplayResult};
use served::ServedThroughput;

/// Factors on the confidence logits with which the prefix scheduler is also simulated.
const LOGIT_FACTORS: [f64; 4] = [0.25, 0.5, 2.0, 4.0];

/// Arguments of `simulate`.
#[derive(clap::Args)]
pub struct Args {
    /// Output folder of a `deepspec-eval run` of the drafter that verified whole blocks
    #[arg(value_name = "DIR")]
    results: PathBuf,
    /// Time of a step by its tokens: a file that `deepspec-eval profile` or SGLang wrote, or a table (.csv)
    #[arg(long, value_name = "FILE")]
    cost: PathBuf,
    /// Temperatures for the confidence logits, which `deepspec-eval calibrate` or SGLang wrote; else confidences are as the run used them
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Schedules to compare, by commas: plain, whole, fixed:K, threshold:T, prefix, prefix-async; by default these with some K and T
    #[arg(long = "schedule", value_name = "S", value_delimiter = ',')]
    schedules: Vec<Policy>,
    /// Sequences decoded at once, by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32])]
    concurrency: Vec<usize>,
    /// Cycles to replay for each schedule and concurrency
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    cycles: u64,
    /// Milliseconds of scheduling in each step of the modelled engine, for schedules that weigh costs; 0 by default
    #[arg(long, value_name = "MS")]
    overhead_ms: Option<f64>,
    /// load.json of `deepspec-eval load` against servers that are named after their schedules. The servers' overhead per
    /// step is fitted to it and added at all loads. Takes eight throughputs or more, of two schedules at two loads at least.
    /// May be repeated
    #[arg(long, value_name = "FILE")]
    served: Vec<PathBuf>,
    /// Folder for simulation.json, explorer.html (a page with sliders) and the plots
    #[arg(long, value_name = "D")]
    output_dir: PathBuf,
    /// Also write the files that SGLang reads there, and the settings of vLLM and llama.cpp, each with its command line. Not
    /// with --served, whose overhead is that of our server
    #[arg(long)]
    emit: bool,
    /// Replace what exists
    #[arg(long)]
    overwrite: bool,
    /// Print simulation.json instead of tables
    #[arg(long)]
    json: bool,
}

/// Results of one schedule at every load.
#[derive(Debug, Serialize)]
pub struct ScheduleCurve {
    /// The schedule.
    pub schedule: Policy,
    /// Factor on the confidence logits.
    pub sharpness: f64,
    /// One result per concurrency.
    pub outcomes: Vec<ReplayResult>,
}

/// Contents of simulation.json.
#[derive(Debug, Serialize)]
pub struct Simulation {
    format: &'static str,
    format_version: u64,
    tool_version: &'static str,
    results: String,
    cost: String,
    recorded_cycles: usize,
    /// Overhead on top of the costs.
    pub host: HostOverhead,
    /// Measured throughputs that the overhead was fitted to; empty without `--served`.
    pub served: Vec<ServedThroughput>,
    /// Largest relative error of the simulated throughputs against `served`.
    pub served_off: Option<f64>,
    /// Results of the schedules.
    #[serde(rename = "courses")]
    pub schedule_curves: Vec<ScheduleCurve>,
    /// Results of the prefix scheduler with over- or underconfident probabilities.
    pub miscalibrated: Vec<ScheduleCurve>,
    /// Mean context length in tokens, at which costs were read.
    pub context: usize,
    /// Lowest concurrency at which whole blocks exceed the measured batch sizes. Times are
    /// extrapolated from there on.
    pub forecast_from: Option<usize>,
    /// Recommended settings for each concurrency.
    pub advice: Vec<Advice>,
    /// Loads at which whole blocks and each fixed length become slower than plain decoding.
    pub crossovers: Vec<Crossover>,
}

/// The load from which a fixed draft length is slower than plain decoding.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Crossover {
    /// Whole blocks, or a fixed number of tokens.
    pub schedule: Policy,
    /// Lowest concurrency at which it is slower; None if it never is.
    pub from: Option<usize>,
}

/// The best schedule at a load.
#[derive(Debug, Clone, Serialize)]
pub struct Advice {
    /// Number of sequences decoded at once.
    pub concurrency: usize,
    /// The schedule with the highest throughput.
    pub best: Policy,
    /// Throughput of `best` over that of plain decoding.
    pub over_plain: f64,
    /// The best number of tokens to verify of each block, 0 for plain decoding.
    pub fixed: usize,
    /// Throughput with `fixed` over that of plain decoding.
    pub fixed_over_plain: f64,
    /// The best threshold and its throughput over that of plain decoding, if thresholds were
    /// simulated.
    pub threshold: Option<(f64, f64)>,
}

/// Runs the command.
///
/// # Errors
/// Usage errors: a run that is missing or cannot be replayed, or costs that end too early. Also
/// fails if an output cannot be written.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    let file = args.output_dir.join("simulation.json");
    let others = [&emit::ENGINE_FILES[..], &["throughput.svg", "frontier.svg", EXPLORER_FILE]].concat();
    // Existing results are compared with the new ones below.
    crate::output::check_fresh(&args.output_dir, "simulation.json", &others, true)?;
    if args.concurrency.is_empty() || args.concurrency.contains(&0) || args.cycles == 0 {
        usage!("--concurrency and --cycles must be at least 1");
    }
    if !args.overhead_ms.is_none_or(|ms| ms >= 0.0 && ms.is_finite()) {
        usage!("--overhead-ms must be at least 0");
    }
    let results = Results::read(&args.results)?;
    let Some(drafter) = &results.drafter else {
        usage!("{} is of plain decoding; there are no blocks to replay", args.results.display());
    };
    let temperatures = match &args.calibration {
        Some(file) => {
            let read = Temperatures::read(file);
            let identity = [&drafter.config_digest[..], &drafter.weights_digest];
            match read.and_then(|read| read.into_temperatures_for(file, identity, drafter.block_size)) {
                Ok(temperatures) => Some(temperatures),
                Err(problem) => usage!("--calibration {problem}"),
            }
        }
        None => None,
    };
    let weights =
        WeightDigests { target: &results.target.weights_digest, drafter: Some(&drafter.weights_digest) };
    // The largest batch of the costs is checked against all loads below.
    let cost = match cost_file::read_step_cost_for(&args.cost, weights, 1) {
        Ok((cost, told)) => {
            told.iter().for_each(|words| tracing::warn!("--cost {words}"));
            Arc::new(cost)
        }
        Err(problem) => usage!("--cost {problem}"),
    };
    let recording = Recording::read(&args.results, &results, temperatures.as_deref())?;
    let schedules = choose_schedules(args, &recording)?;
    let served = if args.served.is_empty() { vec![] } else { served::read(&args.served)? };
    if args.emit && !served.is_empty() {
        usage!(
            "--emit: what our server adds to its steps (--served) is nothing of other engines; leave one of them out"
        );
    }
    if args.overhead_ms.is_some() && served::weighs_costs(&served) {
        usage!("--overhead-ms: --served tells what scheduling takes; leave one of them out");
    }
    if let Some(of) = served.iter().find(|of| of.schedule.reads_confidence() && !recording.confident) {
        usage!(
            "--served: a server with --schedule {} was measured; the drafter has no confidence head",
            of.schedule
        );
    }
    let asked = args.concurrency.iter().map(|&most| ("--concurrency", most));
    let loads = asked.chain(served.iter().map(|served| ("--served: a server at", served.concurrency)));
    if let Some((what, most)) =
        loads.max_by_key(|(_, most)| *most).filter(|(_, most)| *most > cost.max_batch())
    {
        usage!(
            "{what} {most}: {} knows steps of up to {} tokens; profile further",
            args.cost.display(),
            cost.max_batch()
        );
    }
    let simulation = simulate(args, &recording, &cost, &schedules, served, verbosity)?;
    let is_whole = |name: &str| args.output_dir.join(name).exists();
    let is_complete = is_whole(EXPLORER_FILE) && (!args.emit || is_whole("engines.md"));
    if !args.overwrite && is_complete && crate::output::is_already_written(&file, &simulation)? {
        return Ok(());
    }
    atomic::create_dir(&args.output_dir)?;
    render::write_plots(&args.output_dir, &simulation, &args.concurrency)?;
    explorer(&recording, &cost, &simulation).write(
        &args.output_dir,
        &format!(
            "Acceptance from {}, times of steps from {} at {} tokens of context, without the overhead of a server. Points are simulated.",
            simulation.results, simulation.cost, simulation.context
        ),
    )?;
    // Settings of an earlier simulation do not belong to these results.
    emit::remove_engine_files(&args.output_dir)?;
    if args.emit {
        emit::write_engine_files(&args.output_dir, &simulation, &cost, drafter, temperatures.as_deref())?;
    }
    atomic::write_json(&file, &simulation)?;
    tracing::info!("simulation and plots in {}", args.output_dir.display());
    if args.emit {
        tracing::info!("settings of engines in {}", args.output_dir.join("engines.md").display());
    }
    let text = if args.json {
        serde_json::to_string_pretty(&simulation)? + "\n"
    } else {
        render::render(&simulation, &args.concurrency)
    };
    Ok(crate::output::print(&text)?)
}

/// The page with sliders, for the recorded acceptance and the measured times of steps.
fn explorer(recording: &Recording, cost: &StepCost, simulation: &Simulation) -> Explorer {
    let mut requests: Vec<usize> =
        simulation.schedule_curves[0].outcomes.iter().map(|outcome| outcome.concurrency).collect();
    requests.sort_unstable();
    requests.dedup();
    let context = simulation.context;
    let mut page = Explorer::new(
        requests.iter().map(|&requests| requests as f64).collect(),
        recording.block,
        recording.conditional_acceptance(),
        |requests, length| match length {
            0 => cost.plain_seconds(requests as usize, context),
            _ => cost.seconds(requests as usize, requests as usize * (1 + length), context, false),
        },
        |requests, length| if length == 0 { 0.0 } else { cost.draft_seconds(requests as usize) },
    );
    page.points = simulation.schedule_curves[..2]
        .iter()
        .map(|curve| ExplorerPoints {
            name: format!("{}, simulated", curve.schedule),
            points: curve.outcomes.iter().map(|of| (of.concurrency as f64, of.throughput())).collect(),
        })
        .collect();
    page
}

/// The requested schedules, or default ones for the drafter.
fn choose_schedules(args: &Args, recording: &Recording) -> anyhow::Result<Vec<Policy>> {
    let mut schedules = args.schedules.clone();
    if schedules.is_empty() {
        let block = recording.block;
        let lengths =
            std::iter::successors(Some(1), |length| Some(length * 2)).take_while(|&length| length < block);
        schedules.extend(lengths.map(Policy::Fixed));
        if recording.confident {
            schedules.extend([0.5, 0.8].map(Policy::Threshold));
            schedules.extend([Policy::Prefix, Policy::PrefixAsync]);
        }
    }
    if let Some(policy) = schedules.iter().find(|policy| policy.reads_confidence() && !recording.confident) {
        usage!("--schedule {policy}: the drafter has no confidence head");
    }
    // All schedules are compared with plain decoding and whole blocks, so these two come first.
    schedules.retain(|policy| ![Policy::Plain, Policy::Whole].contains(policy));
    schedules.splice(0..0, [Policy::Plain, Policy::Whole]);
    Ok(schedules)
}

fn simulate(
    args: &Args,
    recording: &Recording,
    cost: &Arc<StepCost>,
    schedules: &[Policy],
    served: Vec<ServedThroughput>,
    verbosity: Verbosity,
) -> anyhow::Result<Simulation> {
    let sharper =
        LOGIT_FACTORS.iter().filter(|_| recording.confident).map(|&factor| (Policy::Prefix, factor));
    let wanted: Vec<(Policy, f64)> = schedules.iter().map(|&policy| (policy, 1.0)).chain(sharper).collect();
    let mut progress =
        Progress::new(verbosity, "simulate", (wanted.len() * args.concurrency.len()) as u64, 0);
    let mut schedule_curves = vec![];
    let host = HostOverhead::scheduling_only(1e-3 * args.overhead_ms.unwrap_or(0.0));
    let mut replay = Replay { recording, cost, sharpness: 1.0, host, cycles: args.cycles };
    let fit = if served.is_empty() { None } else { Some(served::fit_overhead(&replay, &served)?) };
    if let Some(fit) = fit {
        replay.host = fit.host;
    }
    // Replays as many schedules in parallel as there are threads, and their loads in parallel too.
    for some in wanted.chunks(rayon::current_num_threads()) {
        let replayed = some.par_iter().map(|&(schedule, sharpness)| {
            let replay = Replay { sharpness, ..replay };
            let loads = args.concurrency.par_iter().map(|&concurrency| replay.run(schedule, concurrency));
            Ok(ScheduleCurve { schedule, sharpness, outcomes: loads.collect::<Result<_, _>>()? })
        });
        schedule_curves.extend(replayed.collect::<Result<Vec<ScheduleCurve>, ScheduleError>>()?);
        let last = some.last().map_or(String::new(), |(schedule, _)| schedule.to_string());
        progress.add((some.len() * args.concurrency.len()) as u64, || last);
    }
    progress.finish();
    let miscalibrated = schedule_curves.split_off(schedules.len());
    let advice =
        (0..args.concurrency.len()).filter_map(|load| best_schedules(&schedule_curves, load)).collect();
    let crossover = |curve: &ScheduleCurve| {
        let slower = |load: &usize| {
            curve.outcomes[*load].throughput() < schedule_curves[0].outcomes[*load].throughput()
        };
        let from = (0..args.concurrency.len()).filter(slower).map(|load| args.concurrency[load]).min();
        Crossover { schedule: curve.schedule, from }
    };
    let lengths =
        schedule_curves.iter().filter(|curve| matches!(curve.schedule, Policy::Whole | Policy::Fixed(_)));
    let crossovers = lengths.map(crossover).collect();
    Ok(Simulation {
        format: "deepspec-simulation",
        format_version: 1,
        tool_version: deepspec_core::VERSION,
        results: args.results.display().to_string(),
        cost: args.cost.display().to_string(),
        recorded_cycles: recording.block_count(),
        host: replay.host,
        served_off: fit.map(|fit| fit.worst),
        served,
        schedule_curves,
        miscalibrated,
        context: recording.mean_context(),
        forecast_from: args
            .concurrency
            .iter()
            .copied()
            .filter(|concurrency| concurrency * (1 + recording.block) > cost.max_batch())
            .min(),
        advice,
        crossovers,
    })
}

fn best_schedules(schedule_curves: &[ScheduleCurve], load: usize) -> Option<Advice> {
    let of = |curve: &ScheduleCurve| curve.outcomes[load].throughput();
    let plain = of(schedule_curves.first()?);
    let best = schedule_curves.iter().max_by(|a, b| of(a).total_cmp(&of(b)))?;
    let fixed = schedule_curves.iter().filter_map(|curve| {
        let tokens = match curve.schedule {
            Policy::Plain => 0,
            Policy::Fixed(tokens) => tokens,
            Policy::Whole => {
                curve.outcomes[load].verified.div_ceil(curve.outcomes[load].cycles.max(1)) as usize
            }
            _ => return None,
        };
        Some((tokens, of(curve) / plain))
    });
    let (fixed, fixed_over_plain) = fixed.max_by(|a, b| a.1.total_cmp(&b.1))?;
    let thresholds = schedule_curves.iter().filter_map(|curve| match curve.schedule {
        Policy::Threshold(threshold) => Some((threshold, of(curve) / plain)),
        _ => None,
    });
    let threshold = thresholds.max_by(|a, b| a.1.total_cmp(&b.1));
    let concurrency = schedule_curves[0].outcomes[load].concurrency;
    Some(Advice {
        concurrency,
        best: best.schedule,
        over_plain: of(best) / plain,
        fixed,
        fixed_over_plain,
        threshold,
    })
}
