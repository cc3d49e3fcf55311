//! From the command line to the loop: everything that can be wrong is found here, before the first forward.

use std::io::{Write, stdout};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

use anyhow::Context;
use deepspec_core::cli::UsageError;
use deepspec_core::recipe::{Precision, Recipe};
use deepspec_core::usage;
use deepspec_models::{Design, ModelError, TargetModel, load_ends};
use deepspec_states::{Dataset, Running, Source, StateSource, StatesError};
use signal_hook::consts::{SIGTERM, SIGUSR1};
use signal_hook::flag;
use tch::{Device, Kind, Tensor};

use crate::args::Args;
use crate::checkpoint::{Checkpoints, restore};
use crate::loader::{Loader, LoaderOptions};
use crate::lr::LrSchedule;
use crate::optimizer::AdamW;
use crate::plan::Plan;
use crate::report::Report;
use crate::schedule::{Schedule, Sizes, shuffled};
use crate::trainer::Trainer;

/// Unusable rows that are named one by one.
const REJECTED_SHOWN: usize = 5;

/// Runs `deepspec-train`.
///
/// # Errors
/// Usage errors for recipes and inputs that do not belong together; failures otherwise.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let recipe = Recipe::load(&args.config, &args.overrides)?;
    let source = Source::open(&recipe, args.verbosity()).map_err(StatesError::report)?;
    // Before anything is read: a drafter that cannot be is refused at once.
    let design = Design::new(&recipe, &source.config)?;
    let dataset = open_data(&recipe, &source)?;
    let schedule = Schedule::new(Sizes {
        world_size: 1,
        dataset_size: dataset.len(),
        local_batch_size: recipe.train.local_batch_size,
        global_batch_size: recipe.train.global_batch_size,
        num_train_epochs: recipe.train.num_train_epochs,
        max_train_steps: recipe.train.max_train_steps,
    })
    .map_err(|error| UsageError(error.to_string()))?;
    let device = deepspec_dist::device(&args.device).map_err(|error| UsageError(error.to_string()))?;
    let running = running(&recipe, device)?;
    let kind = match recipe.train.precision {
        Precision::Bf16 => Kind::BFloat16,
        Precision::Fp32 => Kind::Float,
    };
    let checkpoints = Checkpoints::new(recipe.output_dir());
    let _claim = (!args.plan).then(|| checkpoints.lock()).transpose()?;
    let states = match args.plan || args.init_only {
        true => None,
        false => {
            Some(StateSource::open(&dataset, &source, &recipe, running).map_err(StatesError::report_data)?)
        }
    };
    let (embed, head) = ends(states.as_ref(), &source, device, kind)?;
    let learner = design.build(&embed, &head, recipe.seed, kind)?;
    let optimizer = AdamW::new(learner.parameters(), recipe.train.weight_decay, recipe.train.max_grad_norm);
    let weights = optimizer.weights();
    let plan =
        Plan { recipe: &recipe, source: &source, dataset: &dataset, schedule, running, weights }.text()?;
    if args.plan {
        let resumes =
            checkpoints.latest()?.map_or("starts anew".into(), |path| format!("resumes {}", path.display()));
        writeln!(stdout(), "{plan}\n{:<14}{resumes}", "checkpoints").context("writing the plan")?;
        return Ok(());
    }
    plan.lines().for_each(|line| tracing::info!("{line}"));
    if args.overwrite {
        checkpoints.clear()?;
    }
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGUSR1] {
        // A second signal ends the process at once; the first one only raises the flag.
        flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))
            .context("registering a signal handler")?;
        flag::register(signal, Arc::clone(&stop)).context("registering a signal handler")?;
    }
    let mut trainer = Trainer {
        lr: LrSchedule::new(recipe.train.lr, recipe.train.warmup_ratio, schedule.max_train_steps),
        data: dataset.digest().to_string(),
        recipe: &recipe,
        learner,
        terms: design.terms(),
        optimizer,
        schedule,
        checkpoints,
        stop,
    };
    let latest = trainer.checkpoints.latest()?;
    let first = match &latest {
        Some(path) => {
            let state = restore(path, &recipe, &trainer.data, &mut trainer.optimizer)?;
            tracing::info!("resuming from {}", path.display());
            state.step
        }
        None => 0,
    };
    if args.init_only {
        match (latest, first) {
            (None, _) => trainer.save(0)?,
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
        supervision: design.supervision(),
        local_batch_size: recipe.train.local_batch_size,
        normalization: recipe.train.loss_normalization,
    };
    let report = Report::open(trainer.checkpoints.dir(), first, schedule.max_train_steps, &trainer.terms)?;
    thread::scope(|scope| {
        let loader = Loader::start(scope, &dataset, states, options, first);
        trainer.run(first, loader, report)
    })
}

/// Where and in what the target runs, where it runs: just as it does for a cache.
fn running(recipe: &Recipe, trainer: Device) -> anyhow::Result<Running> {
    let device = match &recipe.data.target_device {
        Some(name) => deepspec_dist::device(name)
            .map_err(|error| UsageError(format!("`data.target_device`: {error}")))?,
        None => trainer,
    };
    let kind = deepspec_dist::default_kind(device);
    Ok(Running { device, kind, per_step: recipe.train.global_batch_size })
}

/// The data set of a recipe, with a word on the rows that are left out.
fn open_data(recipe: &Recipe, source: &Source) -> anyhow::Result<Dataset> {
    let first_epoch = |samples| shuffled(recipe.seed, samples)(0);
    let dataset = Dataset::open(recipe, source, first_epoch).map_err(StatesError::report_data)?;
    if let Some(report) = dataset.report() {
        tracing::info!("{report}");
        for rejected in report.rejected.iter().take(REJECTED_SHOWN) {
            tracing::warn!("{}:{}: {}", rejected.file.display(), rejected.line, rejected.reason);
        }
        if let Some(more) = report.rejected.len().checked_sub(REJECTED_SHOWN).filter(|&more| more > 0) {
            tracing::warn!("{more} more rows cannot be used");
        }
    }
    Ok(dataset)
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
