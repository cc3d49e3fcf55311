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
mod server;
mod setup;
mod turns;

use deepspec_core::cli::{UsageError, Verbosity};
use deepspec_core::{atomic, config, usage};
use deepspec_datasets::suites::TokenizedSuite;
use deepspec_models::{config_digest, weights_digest};
use deepspec_ops::StepTrace;
use serde_json::{Map, Value, json};

use crate::report;
use crate::results::{self, Results, Settings};
pub use args::{Args, Dtype, Switch, domain_parser};
use decode::{DecodePlan, SuitePass};
use entry::DecodeMode;
use journal::Journal;
use models::{DecodeOutput, ModelSettings};
use setup::{Setup, load_suites};

/// Runs the command.
///
/// # Errors
/// Usage errors, models that cannot be loaded, and outputs that cannot be written.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    args.check()?;
    if let Some(url) = &args.server {
        return server::run(args, url, verbosity);
    }
    evaluate(args, verbosity)?.map_or(Ok(()), |results| print_results(args, &results))
}

/// Decodes and scores in this process, and writes the files of the run. Results of the same evaluation are read instead. None for
/// a worker's share.
///
/// # Errors
/// As [`run`].
pub fn evaluate(args: &Args, verbosity: Verbosity) -> anyhow::Result<Option<Results>> {
    // 1. Resolve the arguments. A bad profile path must fail before `--overwrite` deletes anything.
    let place = models::resolve_device_and_dtype(&args.device, args.dtype)?;
    let mut trace = match &args.torch_profile {
        Some(path) => StepTrace::new(path, place.device).map_err(UsageError)?,
        None => StepTrace::disabled(),
    };
    let setup = Setup::resolve(args, place, verbosity)?;
    let suites = load_suites(args, &setup.request_template(), &setup.settings)?;
    atomic::create_dir(&args.output_dir)?;
    let target = setup.target_identity(&args.target)?;
    let facts = evaluation_inputs(&setup, &json!(target), &suites)?;
    let asked = requested_evaluation(args, &facts);
    if args.output_dir.join(results::RESULTS_FILE).exists() && !args.overwrite {
        return read_existing_results(args, &asked).map(Some);
    }

    // 2. Decode the suites.
    let mut journal = Journal::open(&args.output_dir, args.worker, &facts, args.overwrite)?;
    let answers = RunAnswers::decode(args, &setup, &suites, &mut journal, &mut trace, verbosity)?;
    if let Some(worker) = args.worker {
        tracing::info!(
            "worker {worker} is done; when all are, the same command without --worker writes the results"
        );
        return Ok(None);
    }

    // 3. Score the answers and write the results.
    let (settings, identity) = (&setup.settings, setup.drafter.as_ref().map(|(_, identity)| identity));
    let block_size = identity.map_or(0, |drafter| {
        args.max_draft_tokens.map_or(drafter.block_size, |limit| limit.min(drafter.block_size))
    });
    let scored =
        score::score_suites(&suites, &answers.drafted, answers.plain.as_deref(), block_size, settings);
    let recorded = Settings { lanes: answers.replicas, ..settings.clone() };
    let mut results = Results::new(recorded, target, identity.cloned(), scored);
    results.other_rule = answers.other.map(|passes| score::score_other_rule(&suites, &passes, settings));
    results.engine_rules = setup.draft_dir.as_deref().and_then(deepspec_drafters::engine_rules);
    results.confidence = score::score_confidence(&answers.drafted, block_size, settings);
    results.asked = asked;
    outputs::write_run_files(&args.output_dir, &setup.tokenizer, &suites, &answers.drafted, &results)?;
    journal.remove()?;
    Ok(Some(results))
}

/// Answers of all passes, suite by suite.
struct RunAnswers {
    /// With the drafter, or without one if there is none.
    drafted: Vec<SuitePass>,
    /// With the other rule of draft sampling.
    other: Option<Vec<SuitePass>>,
    /// Without the drafter.
    plain: Option<Vec<SuitePass>>,
    /// Number of engines that shared the slots.
    replicas: usize,
}

impl RunAnswers {
    fn decode(
        args: &Args,
        setup: &Setup,
        suites: &[TokenizedSuite],
        journal: &mut Journal,
        trace: &mut StepTrace,
        verbosity: Verbosity,
    ) -> anyhow::Result<Self> {
        let (settings, template) = (&setup.settings, setup.request_template());
        let plan = DecodePlan {
            suites,
            asking: &template,
            seeds: &settings.seeds,
            turns: settings.turns,
            worker: args.worker,
            tree_nodes: settings.verify.tree_budget().map_or(0, |budget| budget.nodes),
        };
        let models =
            ModelSettings { target: &setup.target_dir, place: setup.place, context: setup.context, settings };
        let mut decode = |drafter, mode| models.decode(drafter, &plan, mode, journal, trace, verbosity);
        let drafter = setup.speculation();
        if drafter.is_some() && (!template.sampling.is_greedy() || settings.verify.tree_budget().is_some()) {
            tracing::info!(
                "drafted tokens: {}, verified {}",
                settings.draft_sampling,
                settings.verify.phrase()
            );
        }
        let DecodeOutput { passes: drafted, replicas } = decode(drafter, (DecodeMode::Main, settings.lanes))?;
        let wants = |wanted: bool| drafter.filter(|_| wanted);
        let other = wants(args.reports_other_rule())
            .map(|drafter| decode(Some(drafter), (DecodeMode::Other, replicas)))
            .transpose()?;
        let plain =
            wants(!args.no_baseline).map(|_| decode(None, (DecodeMode::Baseline, replicas))).transpose()?;
        Ok(Self {
            drafted,
            other: other.map(|decoded| decoded.passes),
            plain: plain.map(|decoded| decoded.passes),
            replicas,
        })
    }
}

/// Everything that decides the results, except for speed. Two runs with equal values have equal
/// results.
fn requested_evaluation(args: &Args, facts: &Map<String, Value>) -> Map<String, Value> {
    let mut asked = facts.clone();
    asked.insert("speed-up".into(), json!(!args.no_baseline));
    asked.insert("other rule".into(), json!(args.reports_other_rule()));
    asked.remove("tool_version");
    asked
}

fn print_results(args: &Args, results: &Results) -> anyhow::Result<()> {
    let text = if args.json { results.to_json()? } else { report::terminal(results) };
    Ok(crate::output::print(&text)?)
}

/// Reads the existing results of the same evaluation.
///
/// # Errors
/// A usage error if they are of another evaluation.
fn read_existing_results(args: &Args, asked: &Map<String, Value>) -> anyhow::Result<Results> {
    let (results, dir) = (Results::read(&args.output_dir)?, args.output_dir.display());
    let differences = config::differences(&json!(results.asked), &json!(asked));
    if !differences.is_empty() {
        let told = differences.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
        usage!("{dir} has results of another evaluation already: {told}; --overwrite replaces them");
    }
    tracing::info!("{dir} is complete; nothing to do (--overwrite evaluates anew)");
    Ok(results)
}

/// Everything that the answers or their speed depend on, except threads and replicas. A run can
/// continue a journal only if all values are equal.
fn evaluation_inputs(
    setup: &Setup,
    target: &Value,
    suites: &[TokenizedSuite],
) -> anyhow::Result<Map<String, Value>> {
    let settings = &setup.settings;
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
    if let Some(dir) = &setup.draft_dir {
        facts.insert("drafter config_digest".into(), json!(config_digest(dir)?));
        facts.insert("drafter weights_digest".into(), json!(weights_digest(dir)?));
    }
    if let Some(file) = &settings.cost {
        facts.insert(
            "cost".into(),
            json!(
                std::fs::read(file)
                    .map(|bytes| deepspec_core::digest::sha256_of_bytes(&bytes))
                    .unwrap_or_default()
            ),
        );
    }
    for suite in suites {
        facts.insert(format!("suite {}", suite.rows.suite.name), json!(suite.rows.digest));
    }
    Ok(facts)
}
