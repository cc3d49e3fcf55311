//! From the command line to the loop: everything that can be wrong is found here, before the first forward.

use std::io::{Write, stdout};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use deepspec_cache::{CacheError, Reader};
use deepspec_core::cli::UsageError;
use deepspec_core::recipe::{DrafterRecipe, Precision, Recipe};
use deepspec_core::usage;
use deepspec_models::{Block, BlockConfig, Confidence, LossAlphas, ModelConfig, load_ends};
use deepspec_states::Source;
use signal_hook::consts::{SIGTERM, SIGUSR1};
use signal_hook::flag;
use tch::Kind;

use crate::args::Args;
use crate::checkpoint::{Checkpoints, restore};
use crate::loader::{Loader, LoaderOptions};
use crate::lr::LrSchedule;
use crate::optimizer::AdamW;
use crate::report::Report;
use crate::schedule::{Schedule, Sizes};
use crate::trainer::Trainer;

/// Runs `deepspec-train`.
///
/// # Errors
/// Usage errors for recipes and inputs that do not belong together; failures otherwise.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let recipe = Recipe::load(&args.config, &args.overrides)?;
    let source = Source::open(&recipe).map_err(|error| UsageError(error.to_string()))?;
    let reader = open_cache(&recipe, &source)?;
    let schedule = Schedule::new(Sizes {
        world_size: 1,
        dataset_size: reader.len(),
        local_batch_size: recipe.train.local_batch_size,
        global_batch_size: recipe.train.global_batch_size,
        num_train_epochs: recipe.train.num_train_epochs,
        max_train_steps: recipe.train.max_train_steps,
    })
    .map_err(|error| UsageError(error.to_string()))?;
    let config = block_config(&recipe, &source.config)?;
    let device = deepspec_dist::device(&args.device).map_err(|error| UsageError(error.to_string()))?;
    let kind = match recipe.train.precision {
        Precision::Bf16 => Kind::BFloat16,
        Precision::Fp32 => Kind::Float,
    };
    let (embed, head) = load_ends(&recipe.target_dir(), &source.config, device, kind)?;
    let block = Block::fresh(config, &embed, &head, recipe.seed, kind)?;
    let optimizer = AdamW::new(block.parameters(), recipe.train.weight_decay, recipe.train.max_grad_norm);
    let checkpoints = Checkpoints::new(recipe.output_dir());
    let plan = describe(&recipe, &reader, schedule, &optimizer);
    if args.plan {
        let resumes =
            checkpoints.latest()?.map_or("starts anew".into(), |path| format!("resumes {}", path.display()));
        writeln!(stdout(), "{plan}\n{:<14}{resumes}", "checkpoints").context("writing the plan")?;
        return Ok(());
    }
    plan.lines().for_each(|line| tracing::info!("{line}"));

    let _claim = checkpoints.lock()?;
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
    let loss = recipe.drafter.loss();
    let mut trainer = Trainer {
        lr: LrSchedule::new(recipe.train.lr, recipe.train.warmup_ratio, schedule.max_train_steps),
        alphas: LossAlphas {
            ce: loss.ce_alpha,
            l1: loss.l1_alpha,
            confidence: recipe.drafter.block().confidence.map_or(0.0, |c| c.alpha),
        },
        data: reader.manifest().samples.sha256.clone(),
        recipe: &recipe,
        block,
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
    if first >= schedule.max_train_steps {
        tracing::info!("{} is complete at step {first}; nothing to do", recipe.name);
        return Ok(());
    }
    let options = LoaderOptions {
        schedule,
        seed: recipe.seed,
        num_anchors: recipe.drafter.block().num_anchors,
        block_size: recipe.drafter.block().block_size,
        decay_gamma: loss.decay_gamma,
        local_batch_size: recipe.train.local_batch_size,
        normalization: recipe.train.loss_normalization,
    };
    let report = Report::open(trainer.checkpoints.dir(), first, schedule.max_train_steps)?;
    trainer.run(first, Loader::start(Arc::new(reader), options, first), report)
}

fn open_cache(recipe: &Recipe, source: &Source) -> anyhow::Result<Reader> {
    let dir = recipe.cache_dir();
    if !dir.is_dir() {
        usage!(
            "{}: no such cache; build it with `deepspec-data cache build --config … --output-dir {}`",
            dir.display(),
            dir.display()
        );
    }
    let reader = Reader::open(&dir)?;
    match reader.require(&source.identity) {
        Err(error @ CacheError::Mismatch { .. }) => Err(UsageError(error.to_string()).into()),
        other => Ok(other.map(|()| reader)?),
    }
}

fn block_config(recipe: &Recipe, target: &ModelConfig) -> anyhow::Result<BlockConfig> {
    let block = recipe.drafter.block();
    let config = BlockConfig {
        model: ModelConfig { num_hidden_layers: block.num_draft_layers, ..target.clone() },
        block_size: block.block_size,
        mask_token_id: block.mask_token_id,
        target_layer_ids: recipe.taps(),
        num_target_layers: target.num_hidden_layers,
        num_anchors: block.num_anchors,
        markov: block.markov,
        confidence: block.confidence.map(|confidence| Confidence { with_markov: confidence.with_markov }),
    };
    config.validate().map_err(|(key, problem)| UsageError(format!("{key}: {problem}")))?;
    Ok(config)
}

/// What will run, a line per topic.
fn describe(recipe: &Recipe, reader: &Reader, schedule: Schedule, optimizer: &AdamW) -> String {
    let manifest = reader.manifest();
    let algorithm = match &recipe.drafter {
        DrafterRecipe::Dspark(_) => "DSpark",
        DrafterRecipe::Dflash(_) => "DFlash",
    };
    let weights = optimizer.weights();
    // Working weights and gradients in their kind; masters (where apart) and two moments in float32.
    let bytes_per_weight = match recipe.train.precision {
        Precision::Bf16 => 2 + 2 + 12,
        Precision::Fp32 => 4 + 4 + 8,
    };
    let lines = [
        (
            "drafter",
            format!(
                "{}: {algorithm}, γ = {}, {weights} trainable weights",
                recipe.name,
                recipe.drafter.block().block_size
            ),
        ),
        (
            "data",
            format!(
                "{} samples, {} tokens, {} supervised",
                reader.len(),
                manifest.counts.tokens,
                manifest.counts.supervised_tokens
            ),
        ),
        ("cache", format!("{}, {:.1} MB", recipe.cache_dir().display(), manifest.bytes() as f64 / 1e6)),
        (
            "system prompt",
            format!(
                "{} (for rows that have none)",
                manifest.identity.system_prompt.as_deref().unwrap_or("none")
            ),
        ),
        (
            "schedule",
            format!(
                "{} steps of {} samples, {} per forward; {} steps per epoch, {} epochs begun",
                schedule.max_train_steps,
                recipe.train.global_batch_size,
                recipe.train.local_batch_size,
                schedule.steps_per_epoch,
                schedule.num_train_epochs
            ),
        ),
        (
            "memory",
            format!(
                "{:.1} MB of weights, gradients and optimiser",
                (weights * bytes_per_weight) as f64 / 1e6
            ),
        ),
    ];
    lines.map(|(topic, text)| format!("{topic:<14}{text}")).join("\n")
}
