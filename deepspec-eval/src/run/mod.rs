//! `run`: decodes prompt suites and measures accepted length and speed.

mod args;
mod decode;
mod entry;
#[cfg(test)]
mod fuzz;
mod journal;
mod journal_check;
pub mod models;
mod outputs;
mod score;

use std::path::{Path, PathBuf};

use anyhow::Context;
use deepspec_core::cli::{UsageError, Verbosity};
use deepspec_core::{atomic, config, usage};
use deepspec_cost::policy::Policy;
use deepspec_datasets::suites::{Folder, RequestTemplate, TokenizedSuite};
use deepspec_drafters::Drafter;
use deepspec_engine::Sampling;
use deepspec_hub::{HubError, model_dir};
use deepspec_models::{ModelError, Weights, config_digest, weights_digest};
use deepspec_ops::StepTrace;
use deepspec_text::ChatTokenizer;
use serde_json::{Map, Value, json};

use crate::calibration::Calibration;
use crate::report;
use crate::results::{self, Results, Settings};
pub use args::{Args, Dtype, Switch};
use decode::Plan;
use entry::DecodeMode;
use journal::Journal;
use models::{Decoded, Models};

/// Model folders.
struct Dirs {
    target: PathBuf,
    draft: Option<PathBuf>,
}

impl Dirs {
    /// Downloads the models that are given by a hub id.
    fn find(args: &Args, verbosity: Verbosity) -> anyhow::Result<Self> {
        let fetch = |flag: &'static str, model: &str| {
            model_dir(model, None, verbosity).map_err(HubError::report).context(flag)
        };
        let target = fetch("--target", &args.target)?;
        Ok(Self { target, draft: args.draft().map(|draft| fetch("--draft", draft)).transpose()? })
    }
}

/// Runs the command.
///
/// # Errors
/// Usage errors, models that cannot be loaded, and outputs that cannot be written.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    args.check()?;
    let place = models::place(&args.device, args.dtype)?;
    // A bad profile path must fail before `--overwrite` deletes anything.
    let mut trace = match &args.torch_profile {
        Some(path) => StepTrace::new(path, place.device).map_err(UsageError)?,
        None => StepTrace::none(),
    };
    let dirs = Dirs::find(args, verbosity)?;
    let tokenizer = ChatTokenizer::load(&dirs.target)?;
    let stop_ids = deepspec_models::stop_ids(&dirs.target, tokenizer.eos_token_id())?;
    tokenizer.report_ends(&stop_ids);
    let (context, vocab_size) = models::limits(&dirs.target, &tokenizer)?;
    let named = args.draft().zip(dirs.draft.as_deref());
    let drafter = named.map(|(_, dir)| models::drafter(dir, args, &tokenizer, place)).transpose()?;
    let identity = named.zip(drafter.as_deref());
    let identity =
        identity.map(|((name, dir), drafter)| models::drafter_identity(name, dir, drafter)).transpose()?;
    let settings = settings(args, &dirs, place, drafter.as_deref())?;
    warn_of_thinking(dirs.draft.as_deref(), settings.thinking);
    let asking = RequestTemplate {
        tokenizer: &tokenizer,
        sampling: Sampling::new(args.temperature, settings.seed),
        max_new_tokens: args.max_new_tokens,
        thinking: settings.thinking,
        system_prompt: settings.system_prompt.as_deref(),
        stop_ids: &stop_ids,
        context,
        vocab_size,
    };
    let mut suites = vec![];
    let folder = Folder::open(&args.suites_dir)?;
    for suite in folder.select(&args.suites, &args.domains)? {
        suites.push(asking.prepare(folder.load(suite, settings.seed, args.limit)?)?);
    }
    atomic::create_dir(&args.output_dir)?;
    let target = models::target_identity(&args.target, &dirs.target, &tokenizer, stop_ids.clone())?;
    let facts = facts(&settings, &json!(target), dirs.draft.as_deref(), &suites)?;
    let mut asked = facts.clone();
    asked.insert("speed-up".into(), json!(!args.no_baseline));
    asked.insert("other rule".into(), json!(args.reports_other_rule()));
    asked.remove("tool_version");
    if args.output_dir.join(results::FILE).exists() && !args.overwrite {
        return show_again(args, &asked);
    }
    let mut journal = Journal::open(&args.output_dir, args.worker, &facts, args.overwrite)?;

    let plan = Plan {
        suites: &suites,
        asking: &asking,
        seeds: &settings.seeds,
        turns: settings.turns,
        worker: args.worker,
    };
    let models = Models { target: &dirs.target, place, context, settings: &settings };
    let mut decode = |draft, mode| models.decode(draft, &plan, mode, &mut journal, &mut trace, verbosity);
    let with = drafter.as_deref().zip(identity.as_ref());
    if with.is_some() && !asking.sampling.is_greedy() {
        tracing::info!("drafted tokens: {}", settings.draft_sampling);
    }
    let Decoded { passes: drafted, lanes } = decode(with, (DecodeMode::Main, settings.lanes))?;
    let other = match with {
        Some(_) if args.reports_other_rule() => Some(decode(with, (DecodeMode::Other, lanes))?.passes),
        _ => None,
    };
    let plain = match with {
        Some(_) if !args.no_baseline => Some(decode(None, (DecodeMode::Baseline, lanes))?.passes),
        _ => None,
    };
    if let Some(worker) = args.worker {
        tracing::info!(
            "worker {worker} is done; when all are, the same command without --worker writes the results"
        );
        return Ok(());
    }
    let block_size = identity.as_ref().map_or(0, |drafter| {
        args.max_draft_tokens.map_or(drafter.block_size, |limit| limit.min(drafter.block_size))
    });
    let scored = score::all(&suites, &drafted, plain.as_deref(), block_size, &settings);
    let mut results = Results::new(Settings { lanes, ..settings.clone() }, target, identity, scored);
    results.other_rule = other.map(|passes| score::other_rule(&suites, &passes, &settings));
    results.confidence = score::confidence(&drafted, block_size, &settings);
    results.asked = asked;
    outputs::write(&args.output_dir, &tokenizer, &suites, &drafted, &results)?;
    journal.remove()?;
    let text = if args.json { results.to_json()? } else { report::terminal(&results) };
    Ok(crate::output::print(&text)?)
}

/// Prints the existing results of the same evaluation.
///
/// # Errors
/// A usage error if they are of another evaluation.
fn show_again(args: &Args, asked: &Map<String, Value>) -> anyhow::Result<()> {
    let (results, dir) = (Results::read(&args.output_dir)?, args.output_dir.display());
    let differences = config::differences(&json!(results.asked), &json!(asked));
    if !differences.is_empty() {
        let told = differences.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
        usage!("{dir} has results of another evaluation already: {told}; --overwrite replaces them");
    }
    tracing::info!("{dir} is complete; nothing to do (--overwrite evaluates anew)");
    let text = if args.json { results.to_json()? } else { report::terminal(&results) };
    Ok(crate::output::print(&text)?)
}

fn settings(
    args: &Args,
    dirs: &Dirs,
    place: models::DeviceAndDtype,
    drafter: Option<&dyn Drafter>,
) -> anyhow::Result<Settings> {
    let folders = [Some(&dirs.target), dirs.draft.as_ref()].into_iter().flatten();
    let open = |dir: &PathBuf| Weights::open(dir, "a model", place.device, place.kind);
    let values = folders.map(|dir| Ok(open(dir)?.values())).sum::<Result<usize, ModelError>>()?;
    let calibration = match (&args.calibration, &dirs.draft) {
        (Some(file), Some(draft)) => Some(Calibration::read(file)?.for_drafter(file, draft)?),
        _ => None,
    };
    Ok(Settings {
        seed: args.seeds[0],
        seeds: args.seeds.clone(),
        temperature: args.temperature,
        max_new_tokens: args.max_new_tokens,
        limit: args.limit,
        turns: args.turns,
        thinking: args.thinking == Switch::On,
        system_prompt: args.system_prompt.clone(),
        schedule: args.policy(),
        confidence_threshold: match args.policy() {
            Policy::Threshold(threshold) => Some(threshold),
            _ => None,
        },
        cost: args.cost.as_ref().map(|file| file.display().to_string()),
        calibration,
        no_markov: args.no_markov,
        max_draft_tokens: args.max_draft_tokens,
        draft_sampling: args.draft_sampling.of(drafter),
        slots: args.max_num_seqs,
        lanes: args.replicas(place.device, tch::get_num_threads() as usize, values)?,
        device: place.device_name(),
        dtype: place.kind_name().into(),
        threads: tch::get_num_threads(),
    })
}

/// Warns if the run's thinking mode differs from that of the drafter's training data.
fn warn_of_thinking(draft: Option<&Path>, thinking: bool) {
    let trained = draft.and_then(deepspec_drafters::trained_thinking).filter(|&trained| trained != thinking);
    if let Some(trained) = trained {
        let name = |thinking| if thinking { "on" } else { "off" };
        tracing::warn!(
            "the drafter was trained on answers with thinking {}, this run asks with thinking {}; --thinking {} asks as in training",
            name(trained),
            name(thinking),
            name(trained)
        );
    }
}

/// Everything that the answers or their speed depend on, except threads and lanes. A journal can be
/// continued only if all of it is equal.
fn facts(
    settings: &Settings,
    target: &Value,
    draft: Option<&Path>,
    suites: &[TokenizedSuite],
) -> anyhow::Result<Map<String, Value>> {
    let mut facts = match json!(settings) {
        Value::Object(facts) => facts,
        other => Map::from_iter([("settings".to_string(), other)]),
    };
    for speed in ["threads", "lanes"] {
        facts.remove(speed);
    }
    // Another version may decode differently.
    facts.insert("tool_version".into(), json!(deepspec_core::VERSION));
    // Workers may run on different devices of one machine.
    let kind = settings.device.split(':').next().unwrap_or_default();
    facts.insert("device".into(), json!(kind));
    for part in ["config_digest", "weights_digest", "tokenizer_digest", "template_digest", "stop_ids"] {
        facts.insert(format!("target {part}"), target[part].clone());
    }
    if let Some(dir) = draft {
        facts.insert("drafter config_digest".into(), json!(config_digest(dir)?));
        facts.insert("drafter weights_digest".into(), json!(weights_digest(dir)?));
    }
    if let Some(file) = &settings.cost {
        facts.insert(
            "cost".into(),
            json!(std::fs::read(file).map(|bytes| deepspec_core::digest::bytes(&bytes)).unwrap_or_default()),
        );
    }
    for suite in suites {
        facts.insert(format!("suite {}", suite.rows.suite.name), json!(suite.rows.digest));
    }
    Ok(facts)
}
