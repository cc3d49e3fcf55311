//! From the command line to the loop: everything that can be wrong is found here, before the first forward.

use std::thread;
use std::time::Duration;

use anyhow::Context;
use deepspec_core::cli::{self, ExitWith, UsageError, Verbosity};
use deepspec_core::env::{self, Ranks};
use deepspec_core::recipe::{Backend, Precision, Recipe, ShardingStrategy, States};
use deepspec_core::{config, usage};
use deepspec_dist::{Carrier, DeviceError, GroupError, ProcessGroup, Seat};
use deepspec_drafters::TrainableDrafter;
use deepspec_hub::{HubError, model_dir};
use deepspec_models::{ModelError, TargetModel, load_ends};
use deepspec_states::{Dataset, Running, Source, StateSource, StatesError};
use tch::{Device, Kind, Tensor};

use crate::args::Args;
use crate::bench;
use crate::budget::Costs;
use crate::checkpoint::{Checkpoints, DataId, restore};
use crate::evaluation::{Evaluation, Questions};
use crate::loader::{Loader, LoaderOptions};
use crate::lr::LrSchedule;
use crate::optimizer::AdamW;
use crate::plan::{self, Data, Plan};
use crate::schedule::{Schedule, Sizes, shuffled};
use crate::sinks::{Report, Shown};
use crate::trainer::Trainer;
use crate::{agreement, launch, signals};

/// Unusable rows that are named one by one.
const REJECTED_SHOWN: usize = 5;

/// Runs `deepspec-train`: as one process, as one of many, or as the launcher of many.
///
/// # Errors
/// Usage errors for recipes and inputs that do not belong together; failures otherwise.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let recipe = deepspec_drafters::load_recipe(&args.config, &args.overrides)?;
    let place = env::ranks().map_err(|error| UsageError(error.to_string()))?;
    let backend = recipe.train.backend;
    let processes = processes(args, place.as_ref(), backend)?;
    let trains = !args.plan && args.bench.is_none() && !args.init_only;
    let timeout = Duration::from_secs(recipe.train.timeout_s);
    let local_rank = place.as_ref().map_or(0, |place| place.local_rank);
    let seat = Seat { local_rank, processes, shares: backend == Backend::Gloo };
    let device =
        deepspec_dist::rank_device(&args.device, seat).map_err(|error| UsageError(error.to_string()))?;
    if trains && processes > 1 {
        check_carrier(args, backend, device, place.as_ref(), processes)?;
    }
    let place = match place {
        // The leader plans and makes fresh weights for all.
        Some(place) if place.rank > 0 && !trains => return Ok(()),
        Some(place) if place.world_size == processes => Some(place).filter(|_| trains),
        _ if trains && processes > 1 => return launch::run(processes, timeout),
        _ => None,
    };
    if let Some(steps) = args.bench {
        return bench::run(args, &recipe, steps, device, processes);
    }
    if args.plan {
        return plan::show(args, &recipe, device, seat);
    }
    let group = match &place {
        Some(place) => ProcessGroup::connect(place, device, backend, timeout)?,
        None => ProcessGroup::alone(),
    };
    let result = train(args, &recipe, &group, device, seat);
    if let Err(error) = &result
        && !error.chain().any(|cause| cause.is::<GroupError>() || cause.is::<ExitWith>())
    {
        group.fail(&cli::one_line(error));
    }
    result
}

/// Processes of the whole job.
fn processes(args: &Args, place: Option<&Ranks>, backend: Backend) -> anyhow::Result<usize> {
    let processes = match (args.processes.map(usize::from), place) {
        (Some(asked), Some(Ranks { world_size, .. })) if *world_size > 1 && asked != *world_size => {
            usage!(
                "--processes {asked}: torchrun or srun has started {world_size} processes already; leave it out"
            )
        }
        (Some(asked), _) => asked,
        (None, Some(place)) => place.world_size,
        (None, None) => deepspec_dist::gpus(&args.device).max(1),
    };
    if processes > 1 && deepspec_dist::is_one_gpu(&args.device) && backend != Backend::Gloo {
        usage!(
            "--device {} is one device for {processes} processes; use --device cuda, or let them share it with --set train.backend=gloo, which is slow",
            args.device
        );
    }
    Ok(processes)
}

/// Refuses processes whose tensors nothing would carry, before any is started.
fn check_carrier(
    args: &Args,
    backend: Backend,
    device: Device,
    place: Option<&Ranks>,
    processes: usize,
) -> anyhow::Result<()> {
    let carrier = Carrier::new(backend, device).map_err(|error| UsageError(error.to_string()))?;
    if !matches!(carrier, Carrier::Nccl(_)) {
        return Ok(());
    }
    // Under another launcher each process may be shown its own GPU only.
    let gpus = deepspec_dist::gpus(&args.device);
    if place.is_none() && (1..processes).contains(&gpus) {
        let error = DeviceError::NoneLeft { local_rank: gpus, count: gpus };
        return Err(UsageError(error.to_string()).into());
    }
    Ok(())
}

/// Runs one process of a job; `group` is the process alone where it does not train.
fn train(
    args: &Args,
    recipe: &Recipe,
    group: &ProcessGroup,
    device: Device,
    seat: Seat,
) -> anyhow::Result<()> {
    let processes = seat.processes;
    let kind = kind(recipe.train.precision);
    let source = Source::open(recipe, args.verbosity()).map_err(StatesError::report)?;
    let drafter_plan = deepspec_drafters::plan(recipe, &source.config)?;
    let dataset = open_data(recipe, &source)?;
    let questions = Questions::read(recipe, &source)?;
    let program = bench::rehearse(recipe, drafter_plan.as_ref())?.unwrap_or(0);
    check_writer(recipe, &dataset, group)?;
    let schedule = schedule(recipe, dataset.len(), processes)?;
    let running = running(recipe, device, seat)?;
    let checkpoints = Checkpoints::new(recipe.output_dir());
    let _claim = group.is_leader().then(|| checkpoints.lock()).transpose()?;
    let latest = if args.overwrite { None } else { checkpoints.latest()? };
    agreement::check(group, recipe, dataset.digest(), latest.as_deref())?;
    let states = match args.init_only {
        true => None,
        false => {
            Some(StateSource::open(&dataset, &source, recipe, running).map_err(StatesError::report_data)?)
        }
    };
    let (embed, head) = ends(states.as_ref(), &source, device, kind)?;
    let trainee = drafter_plan.build(&embed, &head, recipe.seed, kind)?;
    // What is frozen is in no state of the optimiser.
    if latest.is_none() || !recipe.train.freeze.is_empty() {
        start_from(recipe, trainee.as_ref(), args.verbosity())?;
    }
    let share = match recipe.train.sharding_strategy {
        ShardingStrategy::NoShard => (0, 1),
        ShardingStrategy::ShardOptimizer => (group.rank(), group.world_size()),
    };
    let (weight_decay, max_grad_norm) = (recipe.train.weight_decay, recipe.train.max_grad_norm);
    let optimizer = AdamW::sharded(trainee.parameters(), weight_decay, max_grad_norm, share);
    let weights = drafter_plan.weights()?;
    let plan = Plan {
        costs: Costs {
            recipe,
            target: &source.config,
            drafter_plan: drafter_plan.as_ref(),
            weights,
            processes,
            program,
            device,
        },
        running,
        origin: source.dir.display().to_string(),
        data: Ok(Data { source: &source, dataset: &dataset, schedule, questions: questions.as_ref() }),
    };
    plan.text()?.lines().for_each(|line| tracing::info!("{line}"));
    let evaluation = questions
        .filter(|_| !args.init_only)
        .map(|questions| Evaluation::open(questions, recipe.target.layer_ids.clone(), &source, device, kind))
        .transpose()?;
    if args.overwrite && group.is_leader() {
        checkpoints.clear()?;
    }
    let stop = signals::stop_flag()?;
    let mut trainer = Trainer {
        lr: LrSchedule::new(recipe.train.lr, recipe.train.warmup_ratio, schedule.max_train_steps),
        data: DataId { digest: dataset.digest().to_string(), rounding: dataset.rounding() },
        recipe,
        group,
        trainee,
        metrics: drafter_plan.metrics(),
        optimizer,
        schedule,
        checkpoints,
        evaluation,
        stop,
    };
    let first = match &latest {
        Some(path) => {
            let state = restore(path, recipe, &trainer.data, &mut trainer.optimizer)?;
            tracing::info!("resuming from {}", path.display());
            if group.is_leader() {
                trainer.checkpoints.settle(&state)?;
            }
            state.step
        }
        None => 0,
    };
    if args.init_only {
        match (latest, first) {
            (None, _) => trainer.save(0, None)?,
            (Some(_), 0) => tracing::info!("the untrained drafter is there already"),
            (Some(_), _) => {
                usage!("{} is already trained for {first} steps; --init-only wants a fresh one", recipe.name)
            }
        }
        return Ok(());
    }
    let Some(states) = states.filter(|_| first < schedule.max_train_steps) else {
        tracing::info!("{} is complete at step {first}; nothing to do", recipe.name);
        return Ok(());
    };
    let options = LoaderOptions {
        schedule,
        seed: recipe.seed,
        drafter_plan: drafter_plan.as_ref(),
        local_batch_size: recipe.train.local_batch_size,
        normalization: recipe.train.loss_normalization,
        rank: group.rank(),
        world_size: group.world_size(),
    };
    let text = config::to_yaml(recipe).map_err(anyhow::Error::msg)?;
    let tensorboard = recipe.logging.tensorboard.then_some(text.as_str());
    let shown = Shown { schedule, metrics: trainer.metrics.as_ref(), tensorboard };
    let open = || Report::open(trainer.checkpoints.dir(), first, &shown);
    let report = group.is_leader().then(open).transpose()?;
    thread::scope(|scope| {
        let loader = Loader::start(scope, &dataset, states, options, first);
        trainer.run(first, loader, report)
    })
}

/// The kind of working weights.
pub fn kind(precision: Precision) -> Kind {
    match precision {
        Precision::Bf16 => Kind::BFloat16,
        Precision::Fp32 => Kind::Float,
    }
}

/// The schedule of `recipe` over so many samples.
///
/// # Errors
/// A usage error if the sizes do not fit together.
pub fn schedule(recipe: &Recipe, samples: usize, processes: usize) -> anyhow::Result<Schedule> {
    let sizes = Sizes {
        world_size: processes,
        dataset_size: samples,
        local_batch_size: recipe.train.local_batch_size,
        global_batch_size: recipe.train.global_batch_size,
        num_train_epochs: recipe.train.num_train_epochs,
        max_train_steps: recipe.train.max_train_steps,
    };
    Ok(Schedule::new(sizes).map_err(|error| UsageError(error.to_string()))?)
}

/// Gives a fresh run the weights that its recipe names.
fn start_from(recipe: &Recipe, trainee: &dyn TrainableDrafter, verbosity: Verbosity) -> anyhow::Result<()> {
    let Some(from) = &recipe.train.init_from else { return Ok(()) };
    let dir = model_dir(from, None, verbosity).map_err(HubError::report).context("train.init_from")?;
    let fresh = trainee.start_from(&dir)?;
    let parts = if fresh.is_empty() { "all of it".into() } else { format!("fresh: {}", fresh.join(", ")) };
    tracing::info!("starting from {} ({parts})", dir.display());
    Ok(())
}

/// Where and in what the target of this process runs, where it runs: just as it does for a cache.
pub fn running(recipe: &Recipe, trainer: Device, seat: Seat) -> anyhow::Result<Running> {
    let device = match &recipe.data.target_device {
        // Targets tell each other nothing: they may share a GPU.
        Some(name) => deepspec_dist::rank_device(name, Seat { shares: true, ..seat })
            .map_err(|error| UsageError(format!("`data.target_device`: {error}")))?,
        None => trainer,
    };
    let kind = deepspec_dist::default_kind(device);
    Ok(Running { device, kind, per_step: recipe.train.global_batch_size })
}

/// The data set of a recipe, with a word on the rows that are left out.
pub fn open_data(recipe: &Recipe, source: &Source) -> anyhow::Result<Dataset> {
    let first_epoch = |samples| shuffled(recipe.seed, samples)(0);
    let place = env::cache_dir().map(|dir| dir.join("samples"));
    let dataset =
        Dataset::open(recipe, source, place.as_deref(), first_epoch).map_err(StatesError::report_data)?;
    if let Some(report) = dataset.report() {
        tracing::info!("{report}");
        for rejected in report.rejected.iter().take(REJECTED_SHOWN) {
            tracing::warn!("{}:{}: {}", rejected.file.display(), rejected.line, rejected.reason);
        }
        if let Some(more) = report.rejected().checked_sub(REJECTED_SHOWN).filter(|&more| more > 0) {
            tracing::warn!("{more} more rows cannot be used");
        }
    }
    Ok(dataset)
}

/// A cache that the first epoch writes has one writer.
fn check_writer(recipe: &Recipe, dataset: &Dataset, group: &ProcessGroup) -> anyhow::Result<()> {
    if group.world_size() > 1 && matches!(recipe.data.states, States::Hybrid(_)) && dataset.needs_target() {
        usage!(
            "data.states: a hybrid's first epoch is written by one process; run it with --processes 1, build the cache with `deepspec-data cache build`, or take data.states: online"
        );
    }
    Ok(())
}

/// The target's embedding and head: the resident target's own where they fit, so that they are held once.
fn ends(
    states: Option<&StateSource<'_>>,
    source: &Source,
    device: Device,
    kind: Kind,
) -> Result<(Tensor, Tensor), ModelError> {
    let resident = states.and_then(StateSource::target).map(TargetModel::ends);
    match resident.filter(|(embed, _)| embed.device() == device && embed.kind() == kind) {
        Some(ends) => Ok(ends),
        None => load_ends(&source.dir, &source.config, device, kind),
    }
}
