//! `run --server`: an engine that serves target and drafter decodes the suites.
//!
//! The target's folder gives tokenizer, chat template and stop tokens; nothing here knows its
//! architecture. Accepted lengths come from the engine's own figures of each request, or from its
//! counters.

mod answer;
mod ask;
mod client;
mod counters;
mod engine;
mod figures;
mod llama_cpp;
mod score;
mod setup;
mod sglang;
mod vllm;

use anyhow::{Context, bail};
use deepspec_core::cli::Verbosity;
use deepspec_core::{atomic, usage};
use deepspec_datasets::suites::TokenizedSuite;
use serde_json::json;
use tokio::runtime::Builder;

use super::args::Args;
use super::decode::{DecodePlan, SuitePass};
use super::entry::DecodeMode;
use super::journal::Journal;
use super::setup::load_suites;
use super::{outputs, print_results, read_existing_results};
use crate::results::{self, DrafterIdentity, FiguresSource, Results, Served};
use answer::CheckedAnswer;
use ask::{AskedPass, ask_suites, warm_up};
use counters::{Counters, per_request_hint};
use engine::Server;
use figures::ReportedCycles;
pub use figures::ServedFigures;
use setup::ServedSetup;

/// Runs `run --server`.
///
/// # Errors
/// Usage errors, servers that do not answer or report no acceptance, and outputs that cannot be
/// written.
pub fn run(args: &Args, url: &str, verbosity: Verbosity) -> anyhow::Result<()> {
    // 1. Resolve the arguments. Finished results need no server.
    let mut setup = ServedSetup::resolve(args, verbosity)?;
    let mut suites = load_suites(args, &setup.request_template(), &setup.settings)?;
    atomic::create_dir(&args.output_dir)?;
    let mut facts = setup.inputs(args, &suites)?;
    let mut asked = facts.clone();
    asked.insert("server".into(), json!(url));
    asked.insert("baseline server".into(), json!(args.baseline_server));
    asked.remove("tool_version");
    if args.output_dir.join(results::RESULTS_FILE).exists() && !args.overwrite {
        return print_results(args, &read_existing_results(args, &asked)?);
    }

    // 2. Ask the servers.
    let runtime = Builder::new_current_thread().enable_all().build().context("starting the HTTP client")?;
    let (server, baseline) = runtime.block_on(connect(args, url))?;
    let contexts =
        [Some(&server), baseline.as_ref()].into_iter().flatten().filter_map(|one| one.info.context);
    if let Some(context) = contexts.min().filter(|&context| context < setup.context) {
        setup.context = context;
        suites = load_suites(args, &setup.request_template(), &setup.settings)?;
    }
    let seen = runtime.block_on(look_at(&server, &suites))?;
    facts.insert("engine".into(), json!(server.name()));
    facts.insert("figures".into(), json!(seen.source));
    facts.insert("context".into(), json!(setup.context));
    let mut journal = Journal::open(&args.output_dir, None, &facts, args.overwrite)?;
    let (template, settings) = (setup.request_template(), &setup.settings);
    let plan = DecodePlan {
        suites: &suites,
        asking: &template,
        seeds: &settings.seeds,
        turns: settings.turns,
        worker: None,
        tree_nodes: 0,
    };
    let ask = async {
        let (source, slots) = (seen.source, args.max_num_seqs);
        let pass = AskedPass { mode: DecodeMode::Main, source, slots };
        let served = ask_suites(&server, &plan, pass, &mut journal, verbosity).await?;
        let plain = match &baseline {
            Some(baseline) => Some(ask_baseline(baseline, &plan, slots, &mut journal, verbosity).await?),
            None => None,
        };
        anyhow::Ok((served, plain))
    };
    let (served, plain) = runtime.block_on(ask)?;

    // 3. Score the answers and write the results.
    let scored = score::score_suites(&suites, &served, plain.as_deref());
    let target = setup.target_identity(&args.target)?;
    let longest = scored.iter().map(|one| one.suite.counts.proposed_at.len()).max().unwrap_or(0);
    let drafter = drafter_identity(args, &server, seen.block_size.unwrap_or(longest));
    let mut results = Results::new(settings.clone(), target, Some(drafter), scored);
    results.served = Some(Served {
        engine: server.engine.title().into(),
        version: server.info.version.clone(),
        url: server.client.url().into(),
        model: server.info.model.clone(),
        verification: server.info.verification.clone(),
        figures: seen.source,
        baseline: baseline.map(|one| format!("{} at {}", one.name(), one.client.url())),
    });
    results.asked = asked;
    outputs::write_run_files(&args.output_dir, &setup.tokenizer, &suites, &served, &results)?;
    journal.remove()?;
    print_results(args, &results)
}

/// Connects to the server, and to the one without a drafter.
async fn connect(args: &Args, url: &str) -> anyhow::Result<(Server, Option<Server>)> {
    let server = Server::connect("--server", url).await?;
    tracing::info!("{}: {}, verification {}", server.client.url(), server.name(), server.info.verification);
    if server.info.speculates == Some(false) {
        bail!("{}", no_drafter(&server));
    }
    let baseline = match &args.baseline_server {
        Some(url) => {
            let baseline = Server::connect("--baseline-server", url).await?;
            if baseline.client.url() == server.client.url() {
                usage!("--baseline-server is --server itself; give an engine without a drafter");
            }
            tracing::info!("{}: {}, without a drafter", baseline.client.url(), baseline.name());
            Some(baseline)
        }
        None => None,
    };
    Ok((server, baseline))
}

/// Findings in the first answers.
struct Seen {
    source: FiguresSource,
    block_size: Option<usize>,
}

/// Asks for the first answers, and finds out where the engine's figures are.
async fn look_at(server: &Server, suites: &[TokenizedSuite]) -> anyhow::Result<Seen> {
    let first = warm_up(server, suites).await?;
    let block_size = first.iter().filter_map(|answer| answer.block_size).max().or(server.info.block_size);
    if first.iter().any(drafts) {
        return Ok(Seen { source: FiguresSource::PerRequest, block_size });
    }
    if Counters::read(server).await?.is_none() {
        bail!("{}", no_drafter(server));
    }
    tracing::warn!(
        "{}: answers have no figures of acceptance; the counters of /metrics are used, which mix all requests \
         to the engine and give intervals only with --max-num-seqs 1; {}",
        server.client.url(),
        per_request_hint(server.engine)
    );
    Ok(Seen { source: FiguresSource::Counters, block_size })
}

/// Whether an answer reports verified blocks.
fn drafts(answer: &CheckedAnswer) -> bool {
    match &answer.figures.cycles {
        ReportedCycles::Steps(steps) => !steps.is_empty(),
        ReportedCycles::Totals(totals) | ReportedCycles::Suite(totals) => totals.cycles > 0,
        ReportedCycles::Unreported => false,
    }
}

fn no_drafter(server: &Server) -> String {
    format!(
        "{}: {} reports no speculation, neither in its answers nor in /metrics: expected an engine with a drafter; \
         start it by {}",
        server.client.name(),
        server.name(),
        engine::start_command(server.engine)
    )
}

/// Asks the server without a drafter for the same answers.
async fn ask_baseline(
    server: &Server,
    plan: &DecodePlan<'_>,
    slots: usize,
    journal: &mut Journal,
    verbosity: Verbosity,
) -> anyhow::Result<Vec<SuitePass>> {
    let first = warm_up(server, plan.suites).await?;
    if server.info.speculates == Some(true)
        || first.iter().any(drafts)
        || Counters::read(server).await?.is_some()
    {
        bail!(
            "{} speculates: expected the same target without a drafter; start the engine without its speculative flags",
            server.client.name()
        );
    }
    let pass = AskedPass { mode: DecodeMode::Baseline, source: FiguresSource::PerRequest, slots };
    ask_suites(server, plan, pass, journal, verbosity).await
}

/// The drafter, as far as its name is known.
fn drafter_identity(args: &Args, server: &Server, block_size: usize) -> DrafterIdentity {
    let name = args.draft.clone().or_else(|| server.info.drafter.clone());
    let hub_id = name.clone().filter(|name| deepspec_hub::is_hub_id(name));
    DrafterIdentity {
        path: name.unwrap_or_else(|| "of the engine".into()),
        hub_id,
        config_digest: String::new(),
        weights_digest: String::new(),
        block_size,
        taps: vec![],
    }
}
