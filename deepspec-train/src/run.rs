//! Runs `deepspec-train`: checks the command line, recipe and inputs before the first forward.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use deepspec_capture::{Dataset, StateSource, StatesError, TargetRuntime, TargetSpec};
use deepspec_core::cli::{self, ExitWith, UsageError, Verbosity};
use deepspec_core::env::{self, DistributedEnv};
use deepspec_core::recipe::{DistBackend, ShardingStrategy, StatesStorage};
use deepspec_core::{config, usage};
use deepspec_drafters::Recipe;
use deepspec_drafters::{DrafterPlan, TrainableDrafter};
use deepspec_hub::{HubError, model_dir};
use deepspec_models::{ModelError, TargetModel, load_embed_and_head};
use deepspec_ops::{DeviceError, LocalRank, StepTrace};
use tch::{Device, Kind, Tensor};

use crate::args::Args;
use crate::bench;
use crate::budget::MemoryEstimator;
use crate::checkpoint::{
    Checkpoints, DataId, check_architecture, check_draft_vocab, restore, untrained_weights,
};
use crate::dist::{CommBackend, GroupError, ProcessGroup};
use crate::evaluation::{EvalPrompts, Evaluation};
use crate::loader::{Loader, LoaderOptions};
use crate::lr::LrSchedule;
use crate::optimizer::AdamW;
use crate::plan::{Plan, PlanData};
use crate::reporters::{ReporterOptions, TrainReporter};
use crate::schedule::{self, Schedule};
use crate::setup::{open_data, target_runtime, weight_dtype};
use crate::trainer::Trainer;
use crate::{dummy_run, launch, rank_check, show_plan, signals};

/// Runs `deepspec-train` as a single process, as one rank of a job, or as the launcher of a job.
///
/// # Errors
/// Usage errors for recipes and inputs that do not fit together; other failures otherwise.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let recipe = deepspec_drafters::load_recipe(&args.config, &args.overrides)?;
    let place = env::distributed_env().map_err(|error| UsageError(error.to_string()))?;
    let backend = recipe.train.backend;
    let processes = process_count(args, place.as_ref(), backend)?;
    let trains = !args.plan && args.bench.is_none() && !args.init_only;
    let timeout = Duration::from_secs(recipe.train.timeout_s);
    let local_rank = place.as_ref().map_or(0, |place| place.local_rank);
    let local = LocalRank { local_rank, processes, shares: backend == DistBackend::Gloo };
    let device =
        deepspec_ops::rank_device(&args.device, local).map_err(|error| UsageError(error.to_string()))?;
    if trains && processes > 1 {
        check_comm_backend(args, backend, device, place.as_ref(), processes)?;
    }
    let place = match place {
        // Rank 0 plans and creates untrained drafters for the whole job.
        Some(place) if place.rank > 0 && !trains => return Ok(()),
        Some(place) if place.world_size == processes => Some(place).filter(|_| trains),
        _ if trains && processes > 1 => return launch::run(processes, timeout),
        _ => None,
    };
    if let Some(steps) = args.bench {
        return bench::run(args, &recipe, steps, device, processes);
    }
    if args.plan {
        return show_plan::print_plan(args, &recipe, device, local);
    }
    let group = match &place {
        Some(place) => ProcessGroup::connect(place, device, backend, timeout)?,
        None => ProcessGroup::single_process(),
    };
    let result = train(args, &recipe, &group, device, local);
    if let Err(error) = &result
        && !error.chain().any(|cause| cause.is::<GroupError>() || cause.is::<ExitWith>())
    {
        group.fail(&cli::one_line(error));
    }
    result
}

/// Number of processes of the whole job.
fn process_count(args: &Args, place: Option<&DistributedEnv>, backend: DistBackend) -> anyhow::Result<usize> {
    let processes = match (args.processes.map(usize::from), place) {
        (Some(asked), Some(DistributedEnv { world_size, .. })) if *world_size > 1 && asked != *world_size => {
            usage!(
                "--processes {asked}: torchrun or srun has started {world_size} processes already; leave it out"
            )
        }
        (Some(asked), _) => asked,
        (None, Some(place)) => place.world_size,
        (None, None) => deepspec_ops::shareable_gpu_count(&args.device).max(1),
    };
    if processes > 1 && deepspec_ops::names_one_gpu(&args.device) && backend != DistBackend::Gloo {
        usage!(
            "--device {} is one device for {processes} processes; use --device cuda, or let them share it with --set train.backend=gloo, which is slow",
            args.device
        );
    }
    Ok(processes)
}

/// Checks that a backend exists for the processes' tensors, before any process starts.
fn check_comm_backend(
    args: &Args,
    backend: DistBackend,
    device: Device,
    place: Option<&DistributedEnv>,
    processes: usize,
) -> anyhow::Result<()> {
    let comm_backend = CommBackend::new(backend, device).map_err(|error| UsageError(error.to_string()))?;
    if !matches!(comm_backend, CommBackend::Nccl(_)) {
        return Ok(());
    }
    // Under another launcher, each process may see only its own GPU.
    let gpus = deepspec_ops::shareable_gpu_count(&args.device);
    if place.is_none() && (1..processes).contains(&gpus) {
        let error = DeviceError::NoneLeft { local_rank: gpus, count: gpus };
        return Err(UsageError(error.to_string()).into());
    }
    Ok(())
}

/// Runs one process of a job; without training, `group` has one process.
fn train(
    args: &Args,
    recipe: &Recipe,
    group: &ProcessGroup,
    device: Device,
    local: LocalRank,
) -> anyhow::Result<()> {
    let job = RankJob { args, recipe, group, device, local, kind: weight_dtype(recipe.train.precision) };
    let (inputs, prompts) = RunInputs::open(&job)?;
    let run_dir = RunDir::open(&job)?;
    rank_check::check_inputs(group, recipe, inputs.dataset.digest(), run_dir.latest.as_deref())?;
    let states = (!args.init_only).then(|| inputs.open_states(recipe)).transpose()?;
    let drafter = inputs.build_drafter(&job, &run_dir, states.as_ref())?;
    // All ranks have read their initial weights after this check, so rank 0 may remove them.
    rank_check::check_weights(group, drafter.as_ref())?;
    let (mut trainer, latest) = inputs.build_trainer(&job, run_dir, drafter, prompts)?;
    let first = resume(&mut trainer, latest.as_deref())?;
    if args.init_only {
        return save_untrained(&mut trainer, latest.is_some(), first);
    }
    match states.filter(|_| first < inputs.schedule.max_train_steps) {
        Some(states) => {
            inputs.run(trainer, states, device, first)?;
            report_unused(&inputs.dataset, group)
        }
        None => {
            tracing::info!("{} is complete at step {first}; nothing to do", recipe.name);
            report_unused(&inputs.dataset, group)
        }
    }
}

/// Returns exit code 1 on rank 0 if rows were left out, as `cache build` does.
fn report_unused(dataset: &Dataset, group: &ProcessGroup) -> anyhow::Result<()> {
    match dataset.report().map(|report| report.rejected()) {
        Some(rejected) if rejected > 0 && group.is_leader() => {
            let reason = format!(
                "training is complete, but {rejected} rows of data.states are unusable; see the warnings above"
            );
            Err(ExitWith { code: 1, reason }.into())
        }
        _ => Ok(()),
    }
}

/// One process of a job.
struct RankJob<'a> {
    args: &'a Args,
    recipe: &'a Recipe,
    group: &'a ProcessGroup,
    device: Device,
    local: LocalRank,
    /// dtype of the drafter's weights.
    kind: Kind,
}

/// All inputs that are read before training starts.
struct RunInputs {
    source: TargetSpec,
    drafter_plan: Box<dyn DrafterPlan>,
    dataset: Dataset,
    /// Bytes of the program and its libraries.
    program: u64,
    schedule: Schedule,
    runtime: TargetRuntime,
}

impl RunInputs {
    /// Opens the inputs and the prompts of evaluations.
    fn open(job: &RankJob) -> anyhow::Result<(Self, Option<EvalPrompts>)> {
        let RankJob { args, recipe, group, device, local, .. } = *job;
        let source = TargetSpec::open(recipe, args.verbosity()).map_err(StatesError::report)?;
        let drafter_plan = deepspec_drafters::plan_drafter(recipe, &source.config)?;
        let dataset = open_data(recipe, &source)?;
        let prompts = EvalPrompts::read(recipe, &source, &dataset)?;
        let program = dummy_run::measure_program_memory(recipe, drafter_plan.as_ref())?.unwrap_or(0);
        check_single_cache_writer(recipe, &dataset, group)?;
        let schedule = schedule::from_recipe(recipe, dataset.len(), local.processes)?;
        let runtime = target_runtime(recipe, device, local)?;
        Ok((Self { source, drafter_plan, dataset, program, schedule, runtime }, prompts))
    }

    fn open_states<'a>(&'a self, recipe: &'a Recipe) -> anyhow::Result<StateSource<'a>> {
        StateSource::open(&self.dataset, &self.source, recipe, self.runtime).map_err(StatesError::report_data)
    }

    /// Builds the drafter with its initial weights. A checkpoint's master weights are loaded later.
    fn build_drafter(
        &self,
        job: &RankJob,
        run_dir: &RunDir,
        states: Option<&StateSource>,
    ) -> anyhow::Result<Box<dyn TrainableDrafter>> {
        let RankJob { args, recipe, device, kind, .. } = *job;
        let (embed, head) = embed_and_head(states, &self.source, device, kind)?;
        let drafter = self.drafter_plan.build(&embed, &head, recipe.seed, kind);
        drafter.load_target(&self.source.dir)?;
        if let Some(latest) = &run_dir.latest {
            check_draft_vocab(latest, drafter.as_ref())?;
        }
        match &run_dir.latest {
            None => load_pretrained(recipe, drafter.as_ref(), args.verbosity())?,
            // With LoRA, `restore` brings the weights that LoRA targets, and not the others.
            Some(latest) if recipe.train.lora.is_some() => drop(drafter.load_pretrained(latest)?),
            Some(_) => {}
        }
        round_untrained(drafter.as_ref());
        Ok(drafter)
    }

    /// Logs the plan and builds the trainer. Also returns the checkpoint to resume from.
    fn build_trainer<'a>(
        &self,
        job: &RankJob<'a>,
        run_dir: RunDir,
        drafter: Box<dyn TrainableDrafter>,
        prompts: Option<EvalPrompts>,
    ) -> anyhow::Result<(Trainer<'a>, Option<PathBuf>)> {
        let RankJob { args, recipe, group, device, local, kind } = *job;
        let share = match recipe.train.sharding_strategy {
            ShardingStrategy::NoShard => (0, 1),
            ShardingStrategy::ShardOptimizer => (group.rank(), group.world_size()),
        };
        let (weight_decay, max_grad_norm) = (recipe.train.weight_decay, recipe.train.max_grad_norm);
        let optimizer = AdamW::new_sharded(drafter.parameters(), weight_decay, max_grad_norm, share)
            .with_stages(&drafter.grad_stages());
        let Self { source, drafter_plan, dataset, program, schedule, runtime } = self;
        let plan = Plan {
            costs: MemoryEstimator {
                recipe,
                target: &source.config,
                drafter_plan: drafter_plan.as_ref(),
                weights: drafter_plan.num_parameters(),
                processes: local.processes,
                program: *program,
                device,
                measures: false,
            },
            runtime: *runtime,
            origin: source.dir.display().to_string(),
            data: Ok(PlanData { source, dataset, schedule: *schedule, prompts: prompts.as_ref() }),
        };
        plan.text()?.lines().for_each(|line| tracing::info!("{line}"));
        let taps = || recipe.target.layer_ids.clone();
        let evaluation = prompts
            .filter(|_| !args.init_only)
            .map(|prompts| Evaluation::open(prompts, taps(), source, device, kind))
            .transpose()?;
        let trace = match args.torch_profile.as_deref().filter(|_| group.is_leader()) {
            Some(path) => StepTrace::new(path, device).map_err(UsageError)?,
            None => StepTrace::disabled(),
        };
        let RunDir { checkpoints, latest } = run_dir;
        if args.overwrite && group.is_leader() {
            checkpoints.clear()?;
        }
        let trainer = Trainer {
            lr: LrSchedule::new(recipe.train.lr, recipe.train.warmup_ratio, schedule.max_train_steps),
            data: DataId {
                digest: dataset.digest().to_string(),
                rounding: dataset.lossy_encoding(),
                thinking: dataset.thinking(&source.tokenizer),
            },
            recipe,
            group,
            drafter,
            metrics: drafter_plan.metric_defs(),
            optimizer,
            schedule: *schedule,
            checkpoints,
            evaluation,
            trace,
            stop: signals::stop_flag()?,
        };
        Ok((trainer, latest))
    }

    /// Trains from step `first`.
    fn run(
        &self,
        mut trainer: Trainer,
        states: StateSource,
        device: Device,
        first: usize,
    ) -> anyhow::Result<()> {
        let (recipe, group) = (trainer.recipe, trainer.group);
        let options = LoaderOptions {
            schedule: self.schedule,
            seed: recipe.seed,
            drafter_plan: self.drafter_plan.as_ref(),
            budget: schedule::forward_budget(&recipe.train),
            normalization: recipe.train.loss_normalization,
            rank: group.rank(),
            world_size: group.world_size(),
            states_device: if self.dataset.needs_target() { self.runtime.device } else { Device::Cpu },
            device,
        };
        let text = config::to_yaml(recipe).map_err(anyhow::Error::msg)?;
        let tensorboard = recipe.logging.tensorboard.then_some(text.as_str());
        let shown = ReporterOptions { schedule: self.schedule, metrics: &trainer.metrics, tensorboard };
        let open = || TrainReporter::open(trainer.checkpoints.dir(), first, &shown);
        let report = group.is_leader().then(open).transpose()?;
        thread::scope(|scope| {
            let loader = Loader::start(scope, &self.dataset, states, options, first);
            trainer.run(first, loader, report)
        })
    }
}

/// The output folder of a run. Only rank 0 writes it.
struct RunDir {
    checkpoints: Checkpoints,
    /// The newest checkpoint; None if it is to be overwritten.
    latest: Option<PathBuf>,
}

impl RunDir {
    fn open(job: &RankJob) -> anyhow::Result<Self> {
        let mut checkpoints = Checkpoints::new(job.recipe.output_dir());
        if job.group.is_leader() {
            checkpoints.lock()?;
        }
        let latest = if job.args.overwrite { None } else { checkpoints.find_latest()? };
        Ok(Self { checkpoints, latest })
    }
}

/// Loads the newest checkpoint and returns its step.
fn resume(trainer: &mut Trainer, latest: Option<&Path>) -> anyhow::Result<usize> {
    let Some(path) = latest else { return Ok(0) };
    let processes = trainer.group.world_size();
    let state = restore(
        path,
        trainer.recipe,
        &trainer.data,
        processes,
        trainer.drafter.as_ref(),
        &mut trainer.optimizer,
    )?;
    check_architecture(path, trainer.drafter.as_ref())?;
    tracing::info!("resuming from {}", path.display());
    if trainer.group.is_leader() {
        trainer.checkpoints.recover_best(&state)?;
    }
    Ok(state.step)
}

/// Saves the untrained drafter, unless it was saved before.
fn save_untrained(trainer: &mut Trainer, resumed: bool, first: usize) -> anyhow::Result<()> {
    match (resumed, first) {
        (false, _) => trainer.save(0, None),
        (true, 0) => {
            tracing::info!("the untrained drafter is there already");
            Ok(())
        }
        (true, _) => {
            let name = &trainer.recipe.name;
            usage!("{name} is already trained for {first} steps; --init-only wants a fresh one")
        }
    }
}

/// Rounds weights that are not trained to bfloat16, the dtype of checkpoints, so that a resumed run has equal
/// values. The embedding and the LM head keep theirs.
fn round_untrained(drafter: &dyn TrainableDrafter) {
    let _guard = tch::no_grad_guard();
    for (_, mut tensor) in untrained_weights(drafter) {
        let rounded = tensor.to_kind(Kind::BFloat16).to_kind(tensor.kind());
        tensor.copy_(&rounded);
    }
}

/// Loads the weights named by `train.init_from` into a new drafter.
fn load_pretrained(
    recipe: &Recipe,
    drafter: &dyn TrainableDrafter,
    verbosity: Verbosity,
) -> anyhow::Result<()> {
    let Some(from) = &recipe.train.init_from else { return Ok(()) };
    let dir = model_dir(from, None, verbosity).map_err(HubError::report).context("train.init_from")?;
    let fresh = drafter.load_pretrained(&dir)?;
    if recipe.train.lora.is_some() && !fresh.is_empty() {
        usage!(
            "train.init_from: {} has no {}, which LoRA would leave random; train these weights first, with train.freeze in place of train.lora",
            dir.display(),
            fresh.join(", ")
        );
    }
    let parts = if fresh.is_empty() { "all of it".into() } else { format!("fresh: {}", fresh.join(", ")) };
    tracing::info!("starting from {} ({parts})", dir.display());
    Ok(())
}

/// Checks that only one process writes a hybrid cache in the first epoch.
fn check_single_cache_writer(recipe: &Recipe, dataset: &Dataset, group: &ProcessGroup) -> anyhow::Result<()> {
    if group.world_size() > 1
        && matches!(recipe.data.states.storage, StatesStorage::Hybrid(_))
        && dataset.computes_states()
    {
        usage!(
            "data.states: a hybrid's first epoch is written by one process; run it with --processes 1, build the cache with `deepspec-data cache build`, or take data.states: online"
        );
    }
    Ok(())
}

/// The target's embedding and head, shared with a resident target if device and dtype match.
fn embed_and_head(
    states: Option<&StateSource<'_>>,
    source: &TargetSpec,
    device: Device,
    kind: Kind,
) -> Result<(Tensor, Tensor), ModelError> {
    let resident = states.and_then(StateSource::target).map(TargetModel::embed_and_head);
    match resident.filter(|(embed, _)| embed.device() == device && embed.kind() == kind) {
        Some(ends) => Ok(ends),
        None => load_embed_and_head(&source.dir, &source.config, device, kind),
    }
}
