//! `cache build`: captures the target's hidden states of conversations on disk.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context;
use clap::ValueEnum;
use deepspec_capture::cache::{
    Builder, Encoding, FinalStates, MANIFEST_FILE, Manifest, Plan, PlannedSample, Worker, merge, remove_cache,
};
use deepspec_capture::served::{AnswerStatesReader, ServedLimits, ServedTarget};
use deepspec_capture::{
    Capture, Rejected, RowCounts, StatesError, TargetSpec, TokenisedRows, fill_shards,
    fill_shards_from_answers, fill_shards_from_servers, tokenise,
};
use deepspec_core::atomic;
use deepspec_core::cli::{self, ExitWith, UsageError, Verbosity, count};
use deepspec_core::progress::Progress;
use deepspec_core::usage;
use deepspec_drafters::Recipe;
use deepspec_ops::{default_dtype, device_name, dtype_name};
use tch::Device;

use super::{Job, mib, multi_process, to_usage_error};
use crate::rejected_rows;
use crate::worker::parse_worker;

/// Arguments of `cache build`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    job: Job,
    /// How a hidden state is stored
    #[arg(long, value_enum, default_value_t = EncodingArg::Bf16)]
    encoding: EncodingArg,
    /// Positions that keep the hidden state of the last layer: those that predict a supervised label, or all. By default the
    /// positions that the recipe's drafter is trained on
    #[arg(long, value_enum)]
    final_states: Option<FinalStatePositionsArg>,
    /// Build the share of worker i of n, from 0; `cache merge` publishes when all have finished
    #[arg(long, value_name = "I/N", value_parser = parse_worker)]
    worker: Option<Worker>,
    /// Processes of this machine that share the work, by default one for each GPU of --device auto or cuda, else one
    #[arg(long, value_name = "N", conflicts_with = "worker")]
    processes: Option<NonZeroUsize>,
    /// Start even if the file system has too little room
    #[arg(long)]
    force: bool,
    /// Discard a cache or unfinished build that is there
    #[arg(long, conflicts_with = "worker")]
    overwrite: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum EncodingArg {
    /// Exactly as the target's states were rounded
    Bf16,
    /// bfloat16, compressed without loss: about two thirds of the bytes
    Bf16z,
    /// e4m3 with a scale for each tap and token: half the bytes
    Fp8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum FinalStatePositionsArg {
    Supervised,
    All,
}

/// Runs the command.
///
/// # Errors
/// With a usage error, or if reading or writing fails. After all shards are written, exits with
/// code 1 if lines were rejected.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    let (recipe, dir) = args.job.open()?;
    let device =
        deepspec_ops::parse_device(&args.job.device).map_err(|error| UsageError(error.to_string()))?;
    let mut source = TargetSpec::open(&recipe, verbosity).map_err(StatesError::report)?;
    source.final_states = args.final_states(source.final_states)?;
    let layout = source.layout(source.final_states, args.encoding());

    let TokenisedRows { samples, report } = tokenise(&args.job.input, &source, |_| ())?;
    check_rows(args, &report, &recipe, &dir)?;
    let plan = Plan::new(samples, layout, args.job.shard_bytes())?;
    if args.overwrite {
        remove_cache(&dir)?;
    }
    let published = dir.join(MANIFEST_FILE).exists();
    let from_engine = recipe.data.states.come_from_engine();
    if let Some(asked) = args.processes.filter(|_| from_engine) {
        usage!(
            "--processes {asked}: an engine computes these states, and one process reads them; leave it out"
        );
    }
    let processes = match published || from_engine {
        true => 1,
        false => args.processes().min(plan.shards().len().max(1)),
    };
    let workers: Vec<Worker> = match args.worker {
        Some(worker) => vec![worker],
        None => (0..processes).filter_map(|i| Worker::new(i, processes)).collect(),
    };
    let missing = workers.iter().map(|worker| Builder::missing_bytes(&dir, &plan, *worker));
    let missing = missing.sum::<Result<u64, _>>()?;
    check_free_space(missing, &dir, args.force)?;
    if processes > 1 {
        let (device, gpus) = (&args.job.device, deepspec_ops::shareable_gpu_count(&args.job.device));
        // Each worker process reports rejected lines once its build is accepted.
        multi_process::build(processes, device, gpus, !report.rejected.is_empty())?;
        let rejects = rejected_rows::rejects_path(&dir.components().collect::<PathBuf>());
        writeln!(cli::stdout(), "{}", describe_row_counts(&report, &recipe))?;
        writeln!(cli::stdout(), "{}: {}", dir.display(), describe_cache(&merge(&dir, |_| ())?))?;
        return exit_if_rejected(&report, &rejects);
    }
    let worker = args.worker.unwrap_or(Worker::ALONE);
    let builder = Builder::open_worker(&dir, &plan, &source.identity, worker).map_err(to_usage_error)?;
    // Only an accepted build may replace the rejected lines of an existing cache.
    let rejects = report_rejected(&report.rejected, &dir)?;
    writeln!(cli::stdout(), "{}", describe_row_counts(&report, &recipe))?;
    let summary = match published {
        true => format!("complete already: {}", describe_cache(&builder.publish()?)),
        false => {
            let spec = &source;
            BuildRun { plan: &plan, missing, recipe: &recipe, spec, device, verbosity, worker }
                .run(builder)?
        }
    };
    writeln!(cli::stdout(), "{}: {summary}", dir.display())?;
    exit_if_rejected(&report, &rejects)
}

/// Exits with code 1 if lines were rejected. `rejects` is the file that lists them.
fn exit_if_rejected(report: &RowCounts, rejects: &Path) -> anyhow::Result<()> {
    if report.rejected.is_empty() {
        return Ok(());
    }
    let (rejected, read) = (report.rejected.len(), report.read);
    let reason = format!("{rejected} of {read} rows were rejected; see {}", rejects.display());
    Err(ExitWith { code: 1, reason }.into())
}

impl Args {
    fn processes(&self) -> usize {
        match (self.worker, self.processes) {
            (Some(_), _) => 1,
            (None, Some(asked)) => asked.get(),
            (None, None) => deepspec_ops::shareable_gpu_count(&self.job.device).max(1),
        }
    }

    fn encoding(&self) -> Encoding {
        match self.encoding {
            EncodingArg::Bf16 => Encoding::Bf16,
            EncodingArg::Bf16z => Encoding::Bf16z,
            EncodingArg::Fp8 => Encoding::Fp8,
        }
    }

    fn final_states(&self, needed: FinalStates) -> anyhow::Result<FinalStates> {
        let kept = match self.final_states {
            Some(FinalStatePositionsArg::Supervised) => FinalStates::Supervised,
            Some(FinalStatePositionsArg::All) => FinalStates::All,
            None => needed,
        };
        if !kept.covers(needed) {
            usage!(
                "--final-states {kept}: the recipe's drafter learns from the states of {needed} positions"
            );
        }
        Ok(kept)
    }
}

/// Refuses a build that does not fit on the file system.
fn check_free_space(needed: u64, dir: &Path, force: bool) -> anyhow::Result<()> {
    let free = free_space(dir)?;
    if needed > free {
        let short =
            format!("{}: {} are to be written and {} are free", dir.display(), mib(needed), mib(free));
        if !force {
            anyhow::bail!("{short}; make room, choose --encoding fp8, or give --force");
        }
        tracing::warn!("{short}");
    }
    Ok(())
}

/// Free bytes on the file system of `dir`, or of its nearest existing parent.
pub(super) fn free_space(dir: &Path) -> anyhow::Result<u64> {
    let absolute = std::path::absolute(dir).with_context(|| dir.display().to_string())?;
    let there = absolute.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    fs4::available_space(there).with_context(|| format!("asking for the room in {}", there.display()))
}

/// Refuses inputs without any sample.
fn check_rows(args: &Args, report: &RowCounts, recipe: &Recipe, dir: &Path) -> anyhow::Result<()> {
    if report.read == 0 {
        let files: Vec<String> = args.job.input.iter().map(|input| input.display().to_string()).collect();
        usage!("--input {}: no rows", files.join(" "));
    }
    if report.kept == 0 {
        report_rejected(&report.rejected, dir)?;
        let limit = recipe.data.max_length;
        anyhow::bail!(
            "no row can be used: {report}; an answer behind data.max_length ({limit}) is cut off, and fewer than 14 supervised tokens, two blocks of seven, are left out"
        );
    }
    Ok(())
}

/// Warns of rejected lines, writes them to a file in the folder that contains the cache, and returns its path.
fn report_rejected(rejected: &[Rejected], dir: &Path) -> anyhow::Result<PathBuf> {
    // Removes a trailing slash, so that the file is next to the folder and not inside it.
    let dir: PathBuf = dir.components().collect();
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        atomic::create_dir(parent)?;
    }
    rejected_rows::report(rejected, &dir)?;
    Ok(rejected_rows::rejects_path(&dir))
}

/// The counts of the rows.
pub(super) fn describe_row_counts(report: &RowCounts, recipe: &Recipe) -> String {
    let RowCounts { cut, tokens, supervised_tokens, .. } = report;
    let limit = recipe.data.max_length;
    format!(
        "{}\n{tokens} tokens, {supervised_tokens} of them supervised; {} cut at {limit} tokens",
        report,
        count(*cut, "row")
    )
}

/// The build of a plan.
struct BuildRun<'a> {
    plan: &'a Plan,
    /// Bytes still to write.
    missing: u64,
    recipe: &'a Recipe,
    spec: &'a TargetSpec,
    device: Device,
    verbosity: Verbosity,
    worker: Worker,
}

impl BuildRun<'_> {
    /// Captures the missing shards and publishes the cache, unless other workers share the build.
    /// Returns a summary.
    fn run(&self, mut builder: Builder) -> anyhow::Result<String> {
        let pending = builder.pending_shards();
        let shards = (0..self.plan.shards().len()).filter(|&shard| self.worker.builds(shard)).count();
        if pending < shards {
            tracing::info!("resuming: {} of {shards} shards are finished", shards - pending);
        }
        let started = Instant::now();
        let tokens = if pending == 0 { 0 } else { self.capture(&mut builder)? };
        let seconds = started.elapsed().as_secs_f64();
        let contents = match self.worker.is_alone() {
            true => describe_cache(&builder.publish()?),
            false => format!(
                "worker {} has finished its {shards} of {} shards; when all have, run `cache merge`",
                self.worker,
                self.plan.shards().len()
            ),
        };
        let rate = tokens as f64 / seconds;
        Ok(format!("{contents}; captured {tokens} tokens in {seconds:.1} s ({rate:.0} tokens/s)"))
    }

    /// Captures the pending shards; returns the number of tokens.
    fn capture(&self, builder: &mut Builder) -> Result<u64, StatesError> {
        let (samples, kind) = (self.plan.samples(), default_dtype(self.device));
        let longest = samples.iter().map(|sample| sample.input_ids.len()).max().unwrap_or(0);
        let (samples, size) = (builder.samples(), mib(self.missing));
        let what = format!("capturing {}, {size},", count(samples, "sample"));
        let (started, mut tokens) = (Instant::now(), 0);
        let mut progress =
            Progress::new(self.verbosity, "samples", samples as u64, builder.done_samples() as u64);
        let count_sample = |sample: &PlannedSample| {
            tokens += u64::from(sample.length());
            progress.add(1, || format!("{:.0} tokens/s", tokens as f64 / started.elapsed().as_secs_f64()));
        };
        match (&self.recipe.data.states.servers, &self.spec.answers) {
            (Some(servers), _) => {
                let limits = ServedLimits::default();
                let mut target = ServedTarget::connect(self.spec, servers, longest, self.device, limits)?;
                tracing::info!("{what} from {}", servers.urls.join(", "));
                builder.set_origin(&target.describe())?;
                fill_shards_from_servers(builder, &mut target, count_sample)?;
            }
            (None, Some(answers)) => {
                let reader = AnswerStatesReader::open(self.spec, answers.clone(), self.device)?;
                tracing::info!("{what} from the answers' states in {}", answers.dir().display());
                builder.set_origin(&reader.describe())?;
                if !self.spec.reads_last_token_state {
                    builder.set_no_last_token_states()?;
                }
                fill_shards_from_answers(builder, &reader, count_sample)?;
            }
            (None, None) => {
                let dir = &self.spec.dir;
                let mut capture = Capture::load(dir, self.recipe, longest, self.device, kind)?;
                tracing::info!("{what} on {} in {}", device_name(self.device), dtype_name(kind));
                fill_shards(builder, &mut capture, count_sample)?;
            }
        }
        progress.finish();
        Ok(tokens)
    }
}

pub(super) fn describe_cache(manifest: &Manifest) -> String {
    let (samples, shards) = (manifest.counts.samples, manifest.shards.len());
    let (samples, shards) = (count(samples as usize, "sample"), count(shards, "shard"));
    format!("{samples} in {shards}, {}", mib(manifest.bytes()))
}
