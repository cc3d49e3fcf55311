//! `transfer`: whether a drafter that was trained for one model serves another, such as a fine-tuned one, before anything is trained.

mod checks;
mod report;

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Parser;
use deepspec_core::cli::Verbosity;
use deepspec_core::{atomic, usage};
use deepspec_datasets::suites::Domain;
use deepspec_hub::{HubError, model_dir};

use crate::compare::LabelledResult;
use crate::results::Results;
use crate::run::{self, Dtype, Switch};
use checks::Fit;
use report::Transfer;

/// File of the findings in the output folder.
const TRANSFER_FILE: &str = "transfer.json";
/// Folders of the evaluations in the output folder.
const TARGET_FOLDER: &str = "target";
const BASE_FOLDER: &str = "base";

/// Arguments of `transfer`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder or hub id of the drafter
    #[arg(long, value_name = "D")]
    draft: String,
    /// Folder, GGUF file or hub id of the model that the drafter is to serve, such as a fine-tuned one
    #[arg(long, value_name = "NEW")]
    target: String,
    /// The model that the drafter was trained for. With it the table shows the kept share: accepted drafts per cycle (τ − 1) with
    /// --target over those with --base. Rules of thumb: from 90 % serve the drafter as it is, from 50 % fine-tune it with LoRA,
    /// below train anew. There is no advice if the interval of τ with --base reaches 1.05 or less
    #[arg(long, value_name = "B")]
    base: Option<String>,
    /// Suites to score, or JSONL files of rows like {"turns": ["…"]}, in addition to --domain
    #[arg(value_name = "SUITE|FILE.jsonl")]
    suites: Vec<String>,
    /// Score the suites of a domain; may be repeated. Without suites and --domain it is all domains
    #[arg(long = "domain", value_name = "DOMAIN", value_parser = run::domain_parser())]
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
    /// Samples decoded at once
    #[arg(long, value_name = "N", default_value_t = 16)]
    max_num_seqs: usize,
    /// Seed of all random draws
    #[arg(long, value_name = "SEED", default_value_t = 980_406)]
    seed: u64,
    /// The chat template's `enable_thinking`
    #[arg(long, value_enum, value_name = "ON", default_value_t = Switch::Off)]
    thinking: Switch,
    /// System message before every prompt
    #[arg(long, value_name = "TEXT")]
    system_prompt: Option<String>,
    /// Where the models run: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: String,
    /// Dtype of the weights; auto is bfloat16 on GPUs that support it, else float32
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    dtype: Dtype,
    /// Folder for transfer.json and the outputs of `deepspec-eval run`, in `target` and `base`. Finished evaluations are kept
    #[arg(long, value_name = "DIR")]
    output_dir: PathBuf,
    /// Replace results that exist
    #[arg(long)]
    overwrite: bool,
    /// Print transfer.json instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// Usage errors: the drafter does not fit the models, or the models do not fit each other. Also those of `run`.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    // 1. Checks, before anything is decoded.
    let evaluation = |target: &str, folder: &str| args.evaluation(target, &args.output_dir.join(folder));
    let fetch = |flag: &'static str, model: &str| {
        model_dir(model, None, verbosity).map_err(HubError::report).context(flag)
    };
    if args.draft == "none" {
        usage!("--draft none: there is nothing to transfer; name a drafter");
    }
    if args.draft == "mtp" {
        usage!(
            "--draft mtp is the MTP layer of each target, not one drafter for both; write that of the base with `deepspec-eval \
             checkpoint extract-mtp` and give its folder"
        );
    }
    evaluation(&args.target, TARGET_FOLDER).check()?;
    let draft = fetch("--draft", &args.draft)?;
    let target = fetch("--target", &args.target)?;
    let base = args.base.as_deref().map(|base| fetch("--base", base)).transpose()?;
    let fit = Fit::check(&draft, &target, base.as_deref())?;

    // 2. Evaluations.
    atomic::create_dir(&args.output_dir)?;
    let evaluate = |model: &str, folder: &str| {
        tracing::info!("{} with {model}", args.draft);
        evaluated(&evaluation(model, folder), folder, verbosity)
    };
    let new = evaluate(&args.target, TARGET_FOLDER)?;
    let old = args.base.as_deref().map(|base| evaluate(base, BASE_FOLDER)).transpose()?;

    // 3. Findings.
    let found = Transfer::new(args, fit, &new, old.as_ref());
    atomic::write_json(&args.output_dir.join(TRANSFER_FILE), &found)?;
    let text = if args.json { serde_json::to_string_pretty(&found)? + "\n" } else { found.render() };
    Ok(crate::output::print(&text)?)
}

/// Runs an evaluation unless it is finished, and reads its results.
fn evaluated(args: &run::Args, folder: &str, verbosity: Verbosity) -> anyhow::Result<LabelledResult> {
    run::evaluate(args, verbosity)?;
    let results = Results::read(&args.output_dir)?;
    Ok(LabelledResult::new(folder.into(), args.output_dir.clone(), results))
}

/// Arguments of `run` with its defaults.
#[derive(Parser)]
struct RunDefaults {
    #[command(flatten)]
    args: run::Args,
}

impl Args {
    /// The evaluation of the drafter with a model.
    fn evaluation(&self, target: &str, output_dir: &Path) -> run::Args {
        let draft = self.draft.as_str();
        let RunDefaults { args } =
            RunDefaults::parse_from(["run", "--target", target, "--draft", draft, "--output-dir", "."]);
        run::Args {
            suites: self.suites.clone(),
            domains: self.domains.clone(),
            suites_dir: self.suites_dir.clone(),
            limit: self.limit,
            temperature: self.temperature,
            max_new_tokens: self.max_new_tokens,
            max_num_seqs: self.max_num_seqs,
            seeds: vec![self.seed],
            thinking: self.thinking,
            system_prompt: self.system_prompt.clone(),
            device: self.device.clone(),
            dtype: self.dtype,
            output_dir: output_dir.to_path_buf(),
            overwrite: self.overwrite,
            // Neither the speed nor the other rule of draft sampling is reported.
            no_baseline: true,
            other_rule: Switch::Off,
            ..args
        }
    }
}
