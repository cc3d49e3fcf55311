//! `checkpoint doctor`: measures why a drafter's accepted length is low.
//!
//! The drafter first decodes a few prompts, which gives the accepted length and the target's answers. The target's hidden states of these
//! answers are captured once. Each trial then runs the drafter over them with one setting changed, teacher-forced as in training. If the
//! accepted length rises, that setting is the likeliest cause.

mod capture;
mod decode;
mod embed_and_lm_head;
mod report;
mod score;
mod trials;

use std::path::{Path, PathBuf};

use deepspec_checkpoint::Engine;
use deepspec_core::cli::Verbosity;
use deepspec_core::usage;
use deepspec_datasets::suites::{SuiteDir, SuiteRows};
use deepspec_engine::DraftSampling;
use deepspec_models::{ModelConfig, TargetModel, TargetOptions};
use deepspec_text::ChatTokenizer;
use tch::{Device, Kind};

use super::model_folder;
use capture::CapturedStates;
use decode::{PromptDecoder, PromptOptions, PromptRun};
use report::{Cause, Diagnosis, Finding, ServingReport};

/// Arguments of `checkpoint doctor`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder, GGUF file or hub id of the target
    #[arg(long, value_name = "M")]
    target: String,
    /// Folder or hub id of the drafter checkpoint
    #[arg(long, value_name = "D")]
    draft: String,
    /// Suite whose prompts are asked, or a JSONL file of rows like {"turns": ["…"]}; may be repeated. Without it the smoke
    /// suites
    #[arg(long = "suite", value_name = "NAME|FILE.jsonl")]
    suites: Vec<String>,
    /// Folder of the suites' files
    #[arg(long, value_name = "DIR", default_value = "eval_datasets")]
    suites_dir: PathBuf,
    /// Prompts of each suite
    #[arg(long, value_name = "N", default_value_t = 4)]
    limit: usize,
    /// Divides the logits; 0 always takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    temperature: f64,
    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_new_tokens: usize,
    /// Seed of all random draws
    #[arg(long, default_value_t = 980_406)]
    seed: u64,
    /// Enable thinking, as in the evaluation with the low accepted length
    #[arg(long)]
    thinking: bool,
    /// Put this system message before every prompt. Give the one of the evaluation whose accepted length was low
    #[arg(long, value_name = "TEXT")]
    system_prompt: Option<String>,
    /// Also list settings of the unconverted checkpoint that this engine (vllm, sglang or llama.cpp) would misread. It adds
    /// the accepted length to expect there with greedy drafting
    #[arg(long, value_name = "ENGINE")]
    engine: Option<Engine>,
    /// Where the models run: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: String,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

/// Number of sequences decoded at once.
const DECODE_SLOTS: usize = 16;
/// Suites that are used if the user names none.
const SMOKE_SUITES: [&str; 3] = ["smoke-math", "smoke-code", "smoke-chat"];

impl Args {
    fn check(&self) -> anyhow::Result<()> {
        let counts = [("--limit", self.limit), ("--max-new-tokens", self.max_new_tokens)];
        if let Some((flag, _)) = counts.iter().find(|(_, count)| *count == 0) {
            usage!("{flag} must be at least 1");
        }
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            usage!("--temperature must be 0 or a positive number, not {}", self.temperature);
        }
        Ok(())
    }

    fn rows(&self) -> anyhow::Result<Vec<SuiteRows>> {
        let names = if self.suites.is_empty() {
            SMOKE_SUITES.map(String::from).to_vec()
        } else {
            self.suites.clone()
        };
        let folder = SuiteDir::open(&self.suites_dir)?;
        let suites = folder.select(&names, &[])?;
        suites.into_iter().map(|suite| folder.load(suite, self.seed, Some(self.limit))).collect()
    }

    fn prompt_options(&self) -> PromptOptions {
        PromptOptions { thinking: self.thinking, system_prompt: self.system_prompt.clone() }
    }
}

/// Device and dtype of the tensors.
type DeviceAndDtype = (Device, Kind);

/// Runs the command.
///
/// # Errors
/// Usage errors, and models that cannot be loaded for a reason that the doctor does not diagnose.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    args.check()?;
    let device = match deepspec_ops::parse_device(&args.device) {
        Ok(device) => device,
        Err(error) => usage!("--device: {error}"),
    };
    let place = (device, deepspec_ops::default_dtype(device));
    let (target, draft) = (
        model_folder("--target", &args.target, verbosity)?,
        model_folder("--draft", &args.draft, verbosity)?,
    );
    let serving = match args.engine {
        Some(engine) => Some(ServingReport::check_engine(engine, &draft, &target, &args.target)?),
        None => None,
    };
    let mut report = match deepspec_drafters::check_layout(&draft) {
        // DeepSpec does not decode with a layout that only engines read.
        Err(unread) if serving.is_some() => Diagnosis::for_unread_layout(&unread),
        _ => diagnose(args, &target, &draft, place)?,
    };
    if let Some(mut serving) = serving {
        // A drafter that does not fit the target was not decoded with.
        if report.accepted_length.is_some() {
            serving.expected = Some(expected_accepted_length(args, &target, &draft, place)?);
        }
        report.serving = Some(serving);
    }
    let text = if args.json { serde_json::to_string_pretty(&report)? + "\n" } else { report.render() };
    Ok(crate::output::print(&text)?)
}

fn diagnose(args: &Args, target: &Path, draft: &Path, place: DeviceAndDtype) -> anyhow::Result<Diagnosis> {
    let _no_grad = tch::no_grad_guard();
    let drafter = match score::open_drafter(draft, target, place)? {
        Ok(drafter) => drafter,
        Err(misfit) => return Ok(Diagnosis::for_misfit(misfit)),
    };
    let config = ModelConfig::load(target)?;
    let tokenizer = ChatTokenizer::load(target)?;
    let stop_ids = deepspec_models::stop_ids(target, tokenizer.eos_token_id())?;
    let prompts = PromptDecoder { args, tokenizer: &tokenizer, stop_ids: &stop_ids, config: &config };

    let mut report = Diagnosis::default();
    let asked = decode_all(&prompts, args, target, draft, place)?;
    let base = asked.first().ok_or_else(|| anyhow::anyhow!("nothing was decoded"))?;
    report.record_run(base);

    let options = TargetOptions {
        device: place.0,
        kind: place.1,
        slots: 1,
        taps: capture::layers_to_capture(drafter.taps(), &config),
    };
    let mut model = TargetModel::load(target, &options)?;
    let embed_and_head = embed_and_lm_head::compare_embed_and_head(drafter.as_ref(), &model);
    report.findings.extend(embed_and_head.findings());
    let captured = CapturedStates::new(&mut model, &options.taps, base);
    trials::run_trials(
        &mut report,
        drafter.as_ref(),
        &captured,
        &model,
        &tokenizer,
        embed_and_head.any_row_differs() || drafter.draft_tokens().is_some(),
        args.temperature,
    )?;
    for other in asked.iter().skip(1) {
        report.compare(base, other);
    }
    report.conclude(embed_and_head.is_permuted());
    Ok(report)
}

/// The accepted length with greedy drafting, the engines' default.
fn expected_accepted_length(
    args: &Args,
    target: &Path,
    draft: &Path,
    place: DeviceAndDtype,
) -> anyhow::Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let (config, tokenizer) = (ModelConfig::load(target)?, ChatTokenizer::load(target)?);
    let stop_ids = deepspec_models::stop_ids(target, tokenizer.eos_token_id())?;
    let prompts = PromptDecoder { args, tokenizer: &tokenizer, stop_ids: &stop_ids, config: &config };
    let mut engine =
        decode::load_engine(target, draft, place, config.max_position_embeddings, DraftSampling::Greedy)?;
    Ok(prompts.decode(&mut engine, args.prompt_options())?.accepted_length().0)
}

/// Decodes with the user's options, then with the variants of them.
fn decode_all(
    prompts: &PromptDecoder,
    args: &Args,
    target: &Path,
    draft: &Path,
    place: DeviceAndDtype,
) -> anyhow::Result<Vec<PromptRun>> {
    let own = args.prompt_options();
    let others = own.variants();
    let context = prompts.config.max_position_embeddings;
    let mut engine = decode::load_engine(target, draft, place, context, DraftSampling::Probabilistic)?;
    std::iter::once(own).chain(others).map(|options| prompts.decode(&mut engine, options)).collect()
}

/// A finding with its cause and evidence.
fn finding(cause: Cause, evidence: String) -> Finding {
    Finding { cause, evidence }
}
