//! `--plan`: describes a run without starting it.

use std::io::Write;

use anyhow::Context;
use deepspec_capture::{StatesError, TargetRuntime, TargetSpec, check_recipe_fits};
use deepspec_core::cli;
use deepspec_core::env;
use deepspec_core::recipe::StatesStorage;
use deepspec_cost::economics::accelerator_memory;
use deepspec_drafters::Recipe;
use deepspec_ops::LocalRank;
use serde_json::json;
use tch::{Device, Kind};

use crate::args::Args;
use crate::budget::MemoryEstimator;
use crate::checkpoint::Checkpoints;
use crate::estimate::PipelineEstimate;
use crate::evaluation::EvalPrompts;
use crate::plan::{Plan, PlanData};
use crate::setup::{open_data, target_runtime};
use crate::target_shape::TargetShape;
use crate::{dummy_run, schedule};

/// Prints the plan of `recipe`. Without the data, prints only facts that follow from the target's
/// sizes. With `--hardware` the plan is for a GPU, even if `trainer` is the CPU.
///
/// # Errors
/// Usage errors for a recipe that does not fit its target or its data; errors of damaged data.
pub fn print_plan(args: &Args, recipe: &Recipe, trainer: Device, local: LocalRank) -> anyhow::Result<()> {
    let processes = local.processes;
    let shape = TargetShape::resolve(recipe, args.verbosity())?;
    let drafter_plan = check_recipe_fits(recipe, &shape.config).map_err(StatesError::report)?;
    let mut runtime = target_runtime(recipe, trainer, local)?;
    let measures = args.estimate.hardware.is_none() || trainer != Device::Cpu;
    let device = if measures { trainer } else { Device::Cuda(0) };
    if !measures && recipe.data.target_device.is_none() {
        runtime = TargetRuntime { device, dtype: Kind::BFloat16, ..runtime };
    }
    let missing = why_data_missing(recipe, &shape);
    let source =
        missing.is_none().then(|| TargetSpec::open(recipe, args.verbosity()).map_err(StatesError::report));
    let source = source.transpose()?;
    let dataset = source.as_ref().map(|source| open_data(recipe, source)).transpose()?;
    let opened = source.as_ref().zip(dataset.as_ref());
    let prompts = opened.map(|(source, dataset)| EvalPrompts::read(recipe, source, dataset));
    let prompts = prompts.transpose()?.flatten();
    let program = dummy_run::measure_program_memory(recipe, drafter_plan.as_ref())?.unwrap_or(0);
    let data = match (&source, &dataset) {
        (Some(source), Some(dataset)) => {
            let schedule = schedule::from_recipe(recipe, dataset.len(), processes)?;
            Ok(PlanData { source, dataset, schedule, prompts: prompts.as_ref() })
        }
        _ => Err(missing.unwrap_or_default()),
    };
    let weights = drafter_plan.num_parameters();
    let (target, drafter_plan) = (&shape.config, drafter_plan.as_ref());
    let costs =
        MemoryEstimator { recipe, target, drafter_plan, weights, processes, program, device, measures };
    let plan = Plan { costs, runtime, origin: shape.origin.clone(), data };
    let latest = if args.overwrite { None } else { Checkpoints::new(recipe.output_dir()).find_latest()? };
    let resumes = latest.map(|path| path.display().to_string());
    let requested = args.estimate.is_requested();
    let estimated = if requested { PipelineEstimate::from_plan(&args.estimate, &plan)? } else { None };
    let limit = args.estimate.hardware.as_deref().and_then(|name| Some((name, accelerator_memory(name)?)));
    let text = if args.json {
        let mut json = plan.json()?;
        json["tool_version"] = json!(deepspec_core::VERSION);
        json["pipeline"] = json!(estimated.as_ref().map(PipelineEstimate::json));
        json["resumes"] = json!(resumes);
        json["memory_limit"] = json!(limit.map(|(_, bytes)| bytes));
        serde_json::to_string_pretty(&json)?
    } else {
        let resumes = resumes.map_or("starts anew".into(), |path| format!("resumes {path}"));
        let estimated = match (estimated, requested) {
            (Some(estimated), _) => Some(("all stages", estimated.text())),
            (None, true) => {
                Some(("all stages", "no times without --rows: there are no samples yet to count".into()))
            }
            (None, false) => None,
        };
        let memory = plan.peak_memory()?.device_bytes() as f64;
        let excess = limit.filter(|(_, limit)| memory > *limit).map(|(name, limit)| {
            let text = format!(
                "{:.1} GB do not fit the {:.0} GB of an {name}; these take less: a cache in place of online states, \
                 train.recompute, and train.sharding_strategy=shard_optimizer on several GPUs",
                memory / 1e9,
                limit / 1e9
            );
            ("warning", text)
        });
        let topics = [Some(("checkpoints", resumes)), estimated, excess];
        let topics = topics.into_iter().flatten().map(|(topic, text)| cli::wrap_paragraph(topic, 14, &text));
        format!("{}\n{}", plan.text()?, topics.collect::<Vec<_>>().join("\n"))
    };
    writeln!(cli::stdout(), "{text}").context("writing the plan")
}

/// Returns the reason why the samples cannot be read on this machine yet.
fn why_data_missing(recipe: &Recipe, shape: &TargetShape) -> Option<String> {
    if !shape.has_weights {
        return Some(format!("{} is not on this machine", recipe.target.model));
    }
    match &recipe.data.states.storage {
        StatesStorage::Cache(dir) => (!env::expand_home(dir).is_dir())
            .then(|| format!("no cache in {dir} (deepspec-data cache build)")),
        StatesStorage::Online | StatesStorage::Hybrid(_) => recipe
            .inputs()
            .iter()
            .find(|file| !file.is_file())
            .map(|file| format!("no answers in {} (deepspec-data regenerate)", file.display())),
    }
}
