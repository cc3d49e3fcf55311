//! `profile`: measures seconds per engine step by batch tokens and context, and seconds of drafting
//! by requests.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use deepspec_core::cli::Verbosity;
use deepspec_core::progress::Progress;
use deepspec_core::rng::{Purpose, Stream};
use deepspec_core::{atomic, config, usage};
use deepspec_cost::cost_file::{self, MeasuredCost, RequestCost, VerifyCost};
use deepspec_cost::curve::isotonic_regression;
use deepspec_cost::planner::Planner;
use deepspec_cost::policy::Policy;
use deepspec_drafters::{Drafter, DrafterOptions};
use deepspec_engine::{Engine, EngineOptions, Event, Proposer, Request, Sampling, Target, VerifyRule};
use deepspec_hub::{HubError, model_dir};
use deepspec_models::{TargetModel, TargetOptions, weights_digest};
use deepspec_text::ChatTokenizer;
use serde::Serialize;
use serde_json::{Value, json};

use crate::results::{DrafterIdentity, TargetIdentity};
use crate::run::{Dtype, models};
use crate::table::Table;

/// Untimed warm-up steps per cell.
const WARM_UP_STEPS: u32 = 2;
/// Minimum number of timed steps, unless they take as long as [`MAX_CELL_TIME`].
const MIN_TIMED_STEPS: u32 = 8;
/// Number of iterations in which the parts of a cost are fitted.
const FIT_ITERATIONS: usize = 50;
/// Minimum time over which the steps of a cell are timed.
const MIN_CELL_TIME: Duration = Duration::from_millis(150);
/// Number of passes over all cells. Other load on the machine only adds time, so the smallest
/// median over the passes counts.
const MEASUREMENT_PASSES: usize = 3;
/// Maximum time over which the steps of a cell are timed.
const MAX_CELL_TIME: Duration = Duration::from_secs(5);

/// Arguments of `profile`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder, GGUF file or hub id (owner/name, owner/name@revision) of the target
    #[arg(long, value_name = "M")]
    target: String,
    /// Folder or hub id of the drafter that will draft for it; without one batches are as large as there are requests
    #[arg(long, value_name = "D")]
    draft: Option<String>,
    /// Sequences decoded at once, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32])]
    max_num_seqs: Vec<usize>,
    /// Tokens in the KV cache of each sequence, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [128])]
    context_lens: Vec<usize>,
    /// Where the models run: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: String,
    /// Dtype of the weights
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    dtype: Dtype,
    /// Where to write the costs, for --cost and `deepspec-eval simulate`
    #[arg(long, value_name = "FILE", default_value = "cost.json")]
    output: PathBuf,
    /// Replace a file that exists
    #[arg(long)]
    overwrite: bool,
    /// Print what was written instead of a table
    #[arg(long)]
    json: bool,
}

/// Measured times of steps with one context length, number of requests and number of batch tokens.
#[derive(Debug, Clone, Copy, Serialize)]
struct StepTiming {
    context: usize,
    requests: usize,
    /// Verified tokens of the batch, including anchors.
    batch_tokens: usize,
    steps: u32,
    /// Median seconds of verification, including the host's work around it.
    verify_seconds: f64,
    /// Median seconds of drafting.
    draft_seconds: f64,
}

/// Machine of the measurement.
#[derive(Serialize)]
struct Machine {
    processor: String,
    device: String,
    dtype: String,
    threads: i32,
}

/// Contents of the cost file.
#[derive(Serialize)]
struct Profile {
    format: &'static str,
    format_version: u64,
    tool_version: &'static str,
    machine: Machine,
    target: TargetIdentity,
    drafter: Option<DrafterIdentity>,
    #[serde(flatten)]
    cost: MeasuredCost,
    /// The measured step times. The fit writes each of them as `verify` + `requests`.
    measured: Vec<StepTiming>,
}

/// Runs the command.
///
/// # Errors
/// Usage errors, models that cannot be loaded, and outputs that cannot be written.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    let (requests, contexts) = (
        sorted_unique("--max-num-seqs", &args.max_num_seqs)?,
        sorted_unique("--context-lens", &args.context_lens)?,
    );
    let place = models::resolve_device_and_dtype(&args.device, args.dtype)?;
    let fetch = |flag: &'static str, model: &str| {
        model_dir(model, None, verbosity).map_err(HubError::report).context(flag)
    };
    let target_dir = fetch("--target", &args.target)?;
    let draft = args.draft.as_ref().map(|draft| Ok::<_, anyhow::Error>((draft, fetch("--draft", draft)?)));
    let draft = draft.transpose()?;
    let tokenizer = ChatTokenizer::load(&target_dir)?;
    let stop_ids = deepspec_models::stop_ids(&target_dir, tokenizer.eos_token_id())?;
    let identity = models::target_identity(&args.target, &target_dir, &tokenizer, stop_ids)?;

    let drafter_weights = draft.as_ref().map(|(_, dir)| weights_digest(dir)).transpose()?;
    let asked = json!({
        "target": identity.weights_digest, "drafter": drafter_weights, "max_num_seqs": requests, "context_lens": contexts,
        "device": place.device_name(), "dtype": place.dtype_name(),
    });
    if !args.overwrite && is_measured(&args.output, &asked)? {
        return Ok(());
    }
    let (models::DeviceAndDtype { device, kind }, slots) =
        (place, requests.iter().copied().max().unwrap_or(1));
    let load = |(_, dir): &(&String, PathBuf)| -> anyhow::Result<Box<dyn Drafter>> {
        models::check_tokens(dir, &tokenizer)?;
        let options = DrafterOptions { device, kind, slots, target: Some(target_dir.clone()) };
        Ok(deepspec_drafters::load_drafter(dir, &options)?)
    };
    let drafter = draft.as_ref().map(load).transpose()?;
    let drafter_identity = match (&draft, &drafter) {
        (Some((name, dir)), Some(drafter)) => Some(models::drafter_identity(name, dir, drafter.as_ref())?),
        _ => None,
    };
    let taps = drafter.as_ref().map_or_else(Vec::new, |drafter| drafter.taps().to_vec());
    let target = TargetModel::load(&target_dir, &TargetOptions { device, kind, slots, taps })?;
    if let Some(drafter) = &drafter {
        drafter.check_fits(target.config())?;
    }
    let longest = target.config().max_position_embeddings;
    let answer = max_answer_tokens(drafter.as_ref().map_or(0, |drafter| drafter.draft_len())) + slots;
    if let Some(context) = contexts.iter().find(|&&context| context.saturating_add(answer) > longest) {
        usage!(
            "--context-lens {context}: with the {answer} tokens of timed steps more than the {longest} that the target holds"
        );
    }
    let draft_sampling = drafter.as_ref().map(|drafter| drafter.draft_sampling()).unwrap_or_default();
    let options = EngineOptions {
        slots,
        context: longest,
        max_draft_tokens: None,
        draft_sampling,
        verify_rule: VerifyRule::Token,
        counts_overrun: false,
    };
    let drafts = drafter.is_some();
    let engine = Engine::new(target, drafter, options).with_exact_times();
    let (cells, prefill) = measure_cells(engine, &requests, &contexts, verbosity)?;
    let plain = if drafts {
        let target = TargetModel::load(&target_dir, &TargetOptions { device, kind, slots, taps: vec![] })?;
        let engine = Engine::<_, Box<dyn Drafter>>::new(target, None, options).with_exact_times();
        measure_cells(engine, &requests, &contexts, verbosity)?.0
    } else {
        vec![]
    };
    let profile = Profile {
        format: cost_file::STEP_COST_FORMAT,
        format_version: cost_file::STEP_COST_VERSION,
        tool_version: deepspec_core::VERSION,
        machine: Machine {
            processor: cpu_name(),
            device: place.device_name(),
            dtype: place.dtype_name().into(),
            threads: tch::get_num_threads(),
        },
        target: identity,
        drafter: drafter_identity,
        cost: fit_cost(&cells, &plain, prefill),
        measured: cells,
    };
    profile.cost.to_step_cost().context("the measured times")?;
    write_profile(&args.output, &profile)?;
    tracing::info!("costs in {}", args.output.display());
    let text =
        if args.json { serde_json::to_string_pretty(&profile)? + "\n" } else { cost_tables(&profile.cost) };
    Ok(crate::output::print(&text)?)
}

/// Whether the file already has this measurement. A usage error if it has another measurement.
fn is_measured(file: &Path, asked: &Value) -> anyhow::Result<bool> {
    if !file.exists() {
        return Ok(false);
    }
    let kept: Value = serde_json::from_str(&atomic::read_text(file)?).unwrap_or_default();
    let column = |name: &str| {
        let cells = kept["measured"].as_array().into_iter().flatten();
        cells.filter_map(|cell| cell[name].as_u64()).collect::<BTreeSet<u64>>()
    };
    let found = json!({
        "target": kept["target"]["weights_digest"], "drafter": kept["drafter"]["weights_digest"],
        "max_num_seqs": column("requests"), "context_lens": column("context"),
        "device": kept["machine"]["device"], "dtype": kept["machine"]["dtype"],
    });
    let differences = config::differences(&found, asked);
    if !differences.is_empty() {
        usage!("{} exists: {}; --overwrite replaces it", file.display(), differences.join(", "));
    }
    tracing::info!("{} is complete; nothing to do (--overwrite measures anew)", file.display());
    Ok(true)
}

fn write_profile(file: &Path, profile: &Profile) -> anyhow::Result<()> {
    if let Some(dir) = file.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        atomic::create_dir(dir)?;
    }
    Ok(atomic::write_json(file, profile)?)
}

fn sorted_unique(flag: &str, counts: &[usize]) -> anyhow::Result<Vec<usize>> {
    if counts.contains(&0) {
        usage!("{flag} must be at least 1");
    }
    let mut counts = counts.to_vec();
    counts.sort_unstable();
    counts.dedup();
    Ok(counts)
}

/// Name of the processor from /proc/cpuinfo, or `unknown`.
fn cpu_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("model name"));
    line.and_then(|line| line.split_once(": ")).map_or_else(|| "unknown".into(), |(_, name)| name.into())
}

/// Lengths of verified prefixes to measure: 2^n − 1 from 0 on, and whole blocks.
fn verified_lengths(block: usize) -> Vec<usize> {
    let mut lengths: Vec<usize> = std::iter::successors(Some(0), |length| Some(2 * length + 1))
        .take_while(|&length| length < block)
        .collect();
    lengths.push(block);
    lengths
}

/// Maximum number of tokens that an answer grows by while its steps are timed.
fn max_answer_tokens(block: usize) -> usize {
    // Fast steps are timed for [`MIN_CELL_TIME`]; more steps would not improve the median. The additional token
    // prevents answers from ending with the last step.
    verified_lengths(block).len() * (WARM_UP_STEPS + 4 * MIN_TIMED_STEPS) as usize * (block + 1) + 1
}

/// Measures the steps of all cells, and seconds per prompt token.
fn measure_cells<T: Target, P: Proposer>(
    mut engine: Engine<T, P>,
    requests: &[usize],
    contexts: &[usize],
    verbosity: Verbosity,
) -> anyhow::Result<(Vec<StepTiming>, f64)> {
    let (block, vocab) = (engine.draft_len(), engine.vocab_size() as u64);
    let lengths = verified_lengths(block);
    let total = (MEASUREMENT_PASSES * requests.len() * contexts.len() * lengths.len()) as u64;
    let mut progress = Progress::new(verbosity, "profile", total, 0);
    let (mut cells, mut prompts, mut prefill) = (BTreeMap::<_, StepTiming>::new(), 0, 0.0);
    for (&context, &count) in (0..MEASUREMENT_PASSES)
        .flat_map(|_| contexts.iter().flat_map(|c| requests.iter().map(move |r| (c, r))))
    {
        let mut tickets = vec![];
        for index in 0..count {
            let stream = Stream::new(context as u64, &format!("prompt {index}"));
            let token = |k: usize| (stream.bits(k as u64, Purpose::Init, 0) % vocab) as i64;
            tickets.push(engine.submit(Request {
                id: index.to_string(),
                prompt: (0..context).map(token).collect(),
                sampling: Sampling::new(1.0, 0),
                // One token for each step that prefills other prompts.
                max_new_tokens: max_answer_tokens(block) + count,
                stop_ids: vec![],
            })?);
        }
        // Several steps may be needed to prefill all prompts; earlier requests decode meanwhile.
        engine = engine.with_planner(Planner::new(Policy::Fixed(0), None)?);
        while engine.queued() > 0 {
            let (before, waiting) = (engine.times(), engine.queued());
            check_all_running(engine.step(), context, count)?;
            prompts += (waiting - engine.queued()) * context;
            prefill += (engine.times().verify - before.verify).as_secs_f64();
        }
        for &length in &lengths {
            engine = engine.with_planner(Planner::new(Policy::Fixed(length), None)?);
            let found = time_cell(&mut engine, context, count, length)?;
            let cell = cells.entry((context, count, length)).or_insert(found);
            cell.verify_seconds = cell.verify_seconds.min(found.verify_seconds);
            cell.draft_seconds = cell.draft_seconds.min(found.draft_seconds);
            progress.add(1, || format!("{count} requests, {} tokens", count * (1 + length)));
        }
        tickets.into_iter().for_each(|ticket| engine.cancel(ticket));
    }
    progress.finish();
    Ok((cells.into_values().collect(), prefill / prompts.max(1) as f64))
}

/// Fails if a request failed or ended while steps were timed.
fn check_all_running(events: Vec<Event>, context: usize, requests: usize) -> anyhow::Result<()> {
    for event in events {
        match event {
            Event::Tokens(..) => {}
            Event::Failed(_, error) => {
                return Err(error).with_context(|| format!("{requests} requests behind {context} tokens"));
            }
            Event::Done(..) => {
                anyhow::bail!("{requests} requests behind {context} tokens: one ended while steps were timed")
            }
        }
    }
    Ok(())
}

fn time_cell<T: Target, P: Proposer>(
    engine: &mut Engine<T, P>,
    context: usize,
    requests: usize,
    length: usize,
) -> anyhow::Result<StepTiming> {
    let (mut verify, mut draft) = (vec![], vec![]);
    let mut started = Instant::now();
    for step in 0..WARM_UP_STEPS + 4 * MIN_TIMED_STEPS {
        if step == WARM_UP_STEPS {
            started = Instant::now();
        }
        let before = engine.times();
        check_all_running(engine.step(), context, requests)?;
        let after = engine.times();
        if step >= WARM_UP_STEPS {
            verify.push(((after.verify - before.verify) + (after.host - before.host)).as_secs_f64());
            draft.push((after.draft - before.draft).as_secs_f64());
        }
        let (timed, spent) = (step.saturating_sub(WARM_UP_STEPS) + 1, started.elapsed());
        if step >= WARM_UP_STEPS
            && (spent > MAX_CELL_TIME || (timed >= MIN_TIMED_STEPS && spent > MIN_CELL_TIME))
        {
            break;
        }
    }
    Ok(StepTiming {
        context,
        requests,
        batch_tokens: requests * (1 + length),
        steps: verify.len() as u32,
        verify_seconds: median(verify),
        draft_seconds: median(draft),
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Splits the cells into costs by tokens, by requests, and of drafting. Costs never fall with size.
fn fit_cost(cells: &[StepTiming], plain: &[StepTiming], prefill: f64) -> MeasuredCost {
    let drafted = cells.iter().any(|cell| cell.batch_tokens > cell.requests);
    let of_requests = if drafted { fit_request_cost(cells) } else { BTreeMap::new() };
    let rest =
        |cell: &StepTiming| cell.verify_seconds - of_requests.get(&cell.requests).copied().unwrap_or(0.0);
    let (requests, seconds) =
        monotone_means(cells.iter().filter(|_| drafted).map(|cell| (cell.requests, cell.draft_seconds)));
    MeasuredCost {
        verify: cost_by_context(cells, rest),
        draft: RequestCost { requests, seconds },
        requests: RequestCost {
            requests: of_requests.keys().copied().collect(),
            seconds: of_requests.into_values().collect(),
        },
        plain: cost_by_context(plain, |cell| cell.verify_seconds),
        prefill_seconds_per_token: prefill,
    }
}

/// One table per context: the mean seconds of the cells with equal batch tokens.
fn cost_by_context(cells: &[StepTiming], seconds: impl Fn(&StepTiming) -> f64) -> Vec<VerifyCost> {
    let table = |cells: &[StepTiming]| {
        let (batch_tokens, seconds) =
            monotone_means(cells.iter().map(|cell| (cell.batch_tokens, seconds(cell))));
        VerifyCost { context: cells[0].context, batch_tokens, seconds }
    };
    cells.chunk_by(|a, b| a.context == b.context).map(table).collect()
}

/// Means of values by key, in ascending order of keys, made non-decreasing.
fn monotone_means(values: impl Iterator<Item = (usize, f64)>) -> (Vec<usize>, Vec<f64>) {
    let mut groups = BTreeMap::<usize, Vec<f64>>::new();
    values.for_each(|(key, value)| groups.entry(key).or_default().push(value));
    let mean = |values: &Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
    let seconds: Vec<f64> = groups.values().map(mean).collect();
    (groups.into_keys().collect(), isotonic_regression(&seconds))
}

/// Seconds that a step takes longer for its number of requests, relative to the fewest requests at
/// the same batch tokens. The parts by tokens and by requests are fitted to the cells by
/// alternation.
fn fit_request_cost(cells: &[StepTiming]) -> BTreeMap<usize, f64> {
    let key = |cell: &StepTiming| (cell.context, cell.batch_tokens);
    let mut of_requests: BTreeMap<usize, f64> = cells.iter().map(|cell| (cell.requests, 0.0)).collect();
    for _ in 0..FIT_ITERATIONS {
        let mut of_tokens = BTreeMap::<_, Vec<f64>>::new();
        for cell in cells {
            of_tokens.entry(key(cell)).or_default().push(cell.verify_seconds - of_requests[&cell.requests]);
        }
        let mean = |values: &Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
        let (requests, seconds) = monotone_means(
            cells.iter().map(|cell| (cell.requests, cell.verify_seconds - mean(&of_tokens[&key(cell)]))),
        );
        let first = seconds.first().copied().unwrap_or(0.0);
        of_requests = requests.into_iter().zip(seconds.into_iter().map(|value| value - first)).collect();
    }
    of_requests
}

fn cost_tables(cost: &MeasuredCost) -> String {
    let curve = |of: &VerifyCost, what: &str| {
        let mut table =
            Table::new(["tokens", "ms per step", "steps/s", "tokens/s"].map(String::from).to_vec());
        for (&tokens, &seconds) in of.batch_tokens.iter().zip(&of.seconds) {
            let cells =
                [1e3 * seconds, 1.0 / seconds, tokens as f64 / seconds].map(|value| format!("{value:.1}"));
            table.row([vec![tokens.to_string()], cells.to_vec()].concat());
        }
        format!("{what} behind {} tokens of history\n{}\n", of.context, table.render())
    };
    let mut text: String = cost.verify.iter().map(|of| curve(of, "verification")).collect();
    text.extend(cost.plain.iter().map(|of| curve(of, "plain decoding, no drafter there,")));
    if !cost.draft.requests.is_empty() {
        let mut table =
            Table::new(["requests", "ms more per step", "ms of drafting"].map(String::from).to_vec());
        let more = cost.requests.seconds.iter();
        for ((requests, seconds), more) in cost.draft.requests.iter().zip(&cost.draft.seconds).zip(more) {
            table.row(vec![
                requests.to_string(),
                format!("{:.1}", 1e3 * more),
                format!("{:.1}", 1e3 * seconds),
            ]);
        }
        text += &format!("by requests\n{}\n", table.render());
    }
    text + &format!("prompts: {:.2} ms per token\n", 1e3 * cost.prefill_seconds_per_token)
}
