//! `run`: decodes prompt suites and measures accepted length and speed.

mod decode;
pub mod models;
mod outputs;
mod report;

use std::path::PathBuf;

use anyhow::Context;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use deepspec_core::cli::Verbosity;
use deepspec_core::suite::Domain;
use deepspec_core::{atomic, usage};
use deepspec_decode::{Completion, Sampling, Tally};
use deepspec_hub::{HubError, model_dir};
use deepspec_suites::{Asking, Folder, Prepared};
use deepspec_text::ChatTokenizer;

use crate::results::{self, Baseline, Metrics, Results, Settings, SuiteResult, Turns};
use decode::Pass;
use models::Models;

/// What to decode with what, and how.
#[derive(clap::Args)]
pub struct Args {
    /// Folder or hub id (owner/name, owner/name@revision) of the Hugging Face model whose answers are generated
    #[arg(long, value_name = "M")]
    target: String,
    /// Folder or hub id of a drafter checkpoint, or of a smaller language model of the same tokenizer, or `none` for plain
    /// decoding
    #[arg(long, value_name = "D")]
    draft: String,
    /// Suite to score; may be repeated, and adds to --domain
    #[arg(long = "suite", value_name = "NAME")]
    suites: Vec<String>,
    /// Score the suites of a domain: the published ones that are there, else the smoke suite; may be repeated.
    /// Without --suite and --domain it is all domains
    #[arg(long = "domain", value_name = "DOMAIN", value_parser = domain_parser())]
    domains: Vec<Domain>,
    /// Folder of the suites' files
    #[arg(long, value_name = "DIR", default_value = "eval_datasets")]
    suites_dir: PathBuf,
    /// Score at most this many samples of each suite
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Divides the logits; 0 always takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    temperature: f64,
    /// Generate at most this many tokens per sample
    #[arg(long, value_name = "N", default_value_t = 2048)]
    max_new_tokens: usize,
    /// Samples decoded at once; changes speed and speed-up, not answers
    #[arg(long, value_name = "N", default_value_t = 16)]
    slots: usize,
    /// Decides every draw, and which rows of a suite with more rows than published are scored
    #[arg(long, default_value_t = 980_406)]
    seed: u64,
    /// Cut each block before the first token of lower confidence
    #[arg(long, value_name = "T")]
    confidence_threshold: Option<f64>,
    /// Verify at most this many drafted tokens per cycle; of a language model as drafter just so many (else 7)
    #[arg(long, value_name = "N")]
    max_draft_tokens: Option<usize>,
    /// The chat template's `enable_thinking`
    #[arg(long, value_enum, value_name = "ON", default_value_t = Switch::Off)]
    thinking: Switch,
    /// Turns of a sample that are answered
    #[arg(long, value_enum, default_value_t = Turns::First)]
    turns: Turns,
    /// System message before every prompt
    #[arg(long, value_name = "TEXT")]
    system_prompt: Option<String>,
    /// Where the models run: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: String,
    /// Kind of the weights; auto is float32 on the CPU and bfloat16 on a GPU
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    dtype: Dtype,
    /// Do not decode the samples again without the drafter, and so measure no speed-up
    #[arg(long)]
    no_baseline: bool,
    /// Folder for results.json, traces.parquet and outputs.jsonl
    #[arg(long, value_name = "D")]
    output_dir: PathBuf,
    /// Replace results that exist
    #[arg(long)]
    overwrite: bool,
    /// Print results.json instead of tables
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Switch {
    On,
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Dtype {
    Auto,
    Float32,
    Bfloat16,
}

/// Reads a domain's name, and lets the help text show them all.
fn domain_parser() -> impl TypedValueParser<Value = Domain> {
    PossibleValuesParser::new(Domain::ALL.map(Domain::name)).try_map(|name| name.parse::<Domain>())
}

impl Args {
    /// The drafter, if there is one.
    fn draft(&self) -> Option<&str> {
        (self.draft != "none").then_some(self.draft.as_str())
    }

    /// The folders of target and drafter, fetched where they are hub ids.
    fn dirs(&self, verbosity: Verbosity) -> anyhow::Result<(PathBuf, Option<PathBuf>)> {
        let fetch = |flag: &'static str, model: &str| {
            model_dir(model, None, verbosity).map_err(HubError::report).context(flag)
        };
        let target = fetch("--target", &self.target)?;
        Ok((target, self.draft().map(|draft| fetch("--draft", draft)).transpose()?))
    }

    /// Checks what can be checked before anything is read.
    fn check(&self) -> anyhow::Result<()> {
        let counts = [
            ("--limit", self.limit),
            ("--max-new-tokens", Some(self.max_new_tokens)),
            ("--slots", Some(self.slots)),
            ("--max-draft-tokens", self.max_draft_tokens),
        ];
        if let Some((flag, _)) = counts.iter().find(|(_, count)| *count == Some(0)) {
            usage!("{flag} must be at least 1");
        }
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            usage!("--temperature must be 0 or a positive number, not {}", self.temperature);
        }
        if let Some(threshold) =
            self.confidence_threshold.filter(|threshold| !(0.0..=1.0).contains(threshold))
        {
            usage!("--confidence-threshold must be between 0 and 1, not {threshold}");
        }
        if self.draft().is_none() && (self.confidence_threshold.is_some() || self.max_draft_tokens.is_some())
        {
            usage!("--confidence-threshold and --max-draft-tokens need a drafter, but --draft is none");
        }
        if self.output_dir.join(results::FILE).exists() && !self.overwrite {
            usage!("{} has results already; --overwrite replaces them", self.output_dir.display());
        }
        Ok(())
    }
}

/// Runs the command.
///
/// # Errors
/// Usage errors, models that cannot be loaded, unwritable outputs.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    args.check()?;
    let place = models::place(&args.device, args.dtype)?;
    let (target, draft) = args.dirs(verbosity)?;
    let tokenizer = ChatTokenizer::load(&target)?;
    let stop_ids = deepspec_models::stop_ids(&target, tokenizer.eos_token_id())?;
    let context = models::context(&target, &tokenizer)?;
    let settings = Settings {
        seed: args.seed,
        temperature: args.temperature,
        max_new_tokens: args.max_new_tokens,
        limit: args.limit,
        turns: args.turns,
        thinking: args.thinking == Switch::On,
        system_prompt: args.system_prompt.clone(),
        confidence_threshold: args.confidence_threshold,
        max_draft_tokens: args.max_draft_tokens,
        slots: args.slots,
        device: place.device_name(),
        dtype: place.kind_name().into(),
        threads: tch::get_num_threads(),
    };
    let asking = Asking {
        tokenizer: &tokenizer,
        sampling: Sampling::new(args.temperature, args.seed),
        max_new_tokens: args.max_new_tokens,
        thinking: settings.thinking,
        system_prompt: settings.system_prompt.as_deref(),
        stop_ids: &stop_ids,
        context,
    };
    let mut suites = vec![];
    let folder = Folder::open(&args.suites_dir)?;
    for suite in folder.select(&args.suites, &args.domains)? {
        suites.push(asking.prepare(folder.load(suite, args.seed, args.limit)?)?);
    }
    atomic::create_dir(&args.output_dir)?;

    let models = Models { target: &target, tokenizer: &tokenizer, place, context, settings: &settings };
    let (drafted, drafter) = models.decode(draft.as_deref(), &suites, verbosity)?;
    let plain = match draft.as_deref() {
        Some(_) if !args.no_baseline => Some(models.decode(None, &suites, verbosity)?.0),
        _ => None,
    };
    let block_size = drafter.as_ref().map_or(0, |drafter| {
        args.max_draft_tokens.map_or(drafter.block_size, |limit| limit.min(drafter.block_size))
    });
    let plain = plain.iter().flatten().map(Some).chain(std::iter::repeat(None));
    let scored = suites
        .iter()
        .zip(&drafted)
        .zip(plain)
        .map(|((suite, pass), plain)| score(suite, pass, plain, block_size));
    let identity = models::target_identity(&target, &tokenizer, stop_ids.clone())?;
    let results = Results::new(settings.clone(), identity, drafter, scored.collect());
    outputs::write(&args.output_dir, &tokenizer, &suites, &drafted, &results)?;
    let text = if args.json { results.to_json()? } else { report::render(&results) };
    Ok(crate::print(&text)?)
}

fn score(suite: &Prepared, pass: &Pass, plain: Option<&Pass>, block_size: usize) -> SuiteResult {
    let tally = |completions: &[Completion]| {
        let mut counts = Tally::new(block_size);
        completions.iter().for_each(|completion| counts.add(completion));
        counts
    };
    let counts = tally(&pass.completions);
    let baseline = plain.map(|plain| Baseline::new(tally(&plain.completions).output_tokens, plain.timing));
    SuiteResult {
        name: suite.rows.suite.name.to_string(),
        domain: suite.rows.suite.domain,
        file: suite.rows.path.display().to_string(),
        file_digest: suite.rows.digest.clone(),
        rows: suite.rows.total,
        skipped: suite.skipped.clone(),
        shortened: suite.shortened,
        prompt_tokens: suite.requests.iter().map(|request| request.prompt.len() as u64).sum(),
        metrics: Metrics::new(&counts, &pass.timing, baseline.as_ref()),
        counts,
        timing: pass.timing,
        baseline,
    }
}
