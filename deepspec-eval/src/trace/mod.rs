//! `trace`: shows one generation cycle by cycle, with drafted, accepted and rejected tokens.

mod recorder;
mod render;

use std::io::{self, IsTerminal};
use std::path::Path;

use anyhow::Context;
use deepspec_core::cli::Verbosity;
use deepspec_core::{env, usage};
use deepspec_cost::planner::Planner;
use deepspec_cost::policy::Policy;
use deepspec_drafters::DrafterOptions;
use deepspec_engine::{Completion, Engine, EngineOptions, Request, Sampling, VerifyRule};
use deepspec_hub::{HubError, model_dir};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_text::{ChatTokenizer, Message, Role, generation_prompt};

use crate::run::{Dtype, Switch, models};
use recorder::Recorder;
use render::Trace;

/// Arguments of `trace`.
#[derive(clap::Args)]
pub struct Args {
    /// The user's message
    prompt: String,
    /// Folder, GGUF file or hub id (owner/name, owner/name@revision) of the model that answers
    #[arg(long, value_name = "M")]
    target: String,
    /// Folder or hub id of a drafter checkpoint, or of a smaller model of the same tokenizer
    #[arg(long, value_name = "D")]
    draft: String,
    /// Divides the logits; 0 always takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    temperature: f64,
    /// Generate at most this many tokens
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_new_tokens: usize,
    /// Seed of all random draws
    #[arg(long, default_value_t = 980_406)]
    seed: u64,
    /// Cut each block before the first token of lower confidence
    #[arg(long, value_name = "T")]
    confidence_threshold: Option<f64>,
    /// Verify at most this many drafted tokens per cycle
    #[arg(long, value_name = "N")]
    max_draft_tokens: Option<usize>,
    /// The chat template's `enable_thinking`
    #[arg(long, value_enum, value_name = "ON", default_value_t = Switch::Off)]
    thinking: Switch,
    /// System message before the prompt
    #[arg(long, value_name = "TEXT")]
    system_prompt: Option<String>,
    /// Where the models run: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: String,
    /// Dtype of the weights; auto is bfloat16 on GPUs that support it, else float32
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    dtype: Dtype,
    /// When to colour; auto is on a terminal, unless NO_COLOR is set
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = Colour::Auto)]
    color: Colour,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Colour {
    Auto,
    Always,
    Never,
}

/// Runs the command.
///
/// # Errors
/// Usage errors, and models that cannot be loaded.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    args.check()?;
    let fetch = |flag: &'static str, model: &str| {
        model_dir(model, None, verbosity).map_err(HubError::report).context(flag)
    };
    let (target, draft) = (fetch("--target", &args.target)?, fetch("--draft", &args.draft)?);
    let tokenizer = ChatTokenizer::load(&target)?;
    let messages = [Message::new(Role::User, args.prompt.clone())];
    let (system, thinking) = (args.system_prompt.as_deref(), args.thinking == Switch::On);
    let request = Request {
        id: "trace".into(),
        prompt: generation_prompt(&tokenizer, &messages, system, Some(thinking))?,
        sampling: Sampling::new(args.temperature, args.seed),
        max_new_tokens: args.max_new_tokens,
        stop_ids: deepspec_models::stop_ids(&target, tokenizer.eos_token_id())?,
    };
    tokenizer.log_stop_tokens(&request.stop_ids);
    let (completion, blocks) = args.generate(&target, &draft, &tokenizer, request)?;
    let trace = Trace::new(&tokenizer, &completion, &blocks)?;
    let colour = match args.color {
        Colour::Auto => io::stdout().is_terminal() && !env::is_color_disabled(),
        Colour::Always => true,
        Colour::Never => false,
    };
    let text = if args.json { serde_json::to_string_pretty(&trace)? + "\n" } else { trace.render(colour) };
    Ok(crate::output::print(&text)?)
}

impl Args {
    fn check(&self) -> anyhow::Result<()> {
        if self.max_new_tokens == 0 || self.max_draft_tokens == Some(0) {
            usage!("--max-new-tokens and --max-draft-tokens must be at least 1");
        }
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            usage!("--temperature must be 0 or a positive number, not {}", self.temperature);
        }
        match self.confidence_threshold.filter(|threshold| !(0.0..=1.0).contains(threshold)) {
            Some(threshold) => usage!("--confidence-threshold must be between 0 and 1, not {threshold}"),
            None => Ok(()),
        }
    }

    /// Generates the answer and records every drafted block.
    fn generate(
        &self,
        target: &Path,
        draft: &Path,
        tokenizer: &ChatTokenizer,
        request: Request,
    ) -> anyhow::Result<(Completion, Vec<Vec<i64>>)> {
        let models::DeviceAndDtype { device, kind } =
            models::resolve_device_and_dtype(&self.device, self.dtype)?;
        let (context, _) = models::context_and_vocab_size(target, tokenizer)?;
        models::check_tokens(draft, tokenizer)?;
        let mut drafter = deepspec_drafters::load_drafter(
            draft,
            &DrafterOptions { device, kind, slots: 1, target: Some(target.to_path_buf()) },
        )?;
        if let Some(tokens) = self.max_draft_tokens {
            drafter.set_draft_len(tokens);
        }
        let taps = drafter.taps().to_vec();
        let target = TargetModel::load(target, &TargetOptions { device, kind, slots: 1, taps })?;
        drafter.check_fits(target.config())?;
        if self.confidence_threshold.is_some() && !drafter.has_confidence_head() {
            usage!("--confidence-threshold: the drafter has no confidence head");
        }
        let options = EngineOptions {
            slots: 1,
            context,
            max_draft_tokens: self.max_draft_tokens,
            draft_sampling: drafter.draft_sampling(),
            verify_rule: VerifyRule::Token,
            counts_overrun: false,
        };
        let recorder = Recorder::new(drafter);
        let blocks = recorder.blocks();
        let policy = self.confidence_threshold.map_or(Policy::Whole, Policy::Threshold);
        let engine = Engine::new(target, Some(recorder), options).with_planner(Planner::new(policy, None)?);
        let mut completions = { engine }.run(vec![request], |_| {})?;
        let completion = completions.pop().context("the engine answers every request")?;
        Ok((completion, blocks.take()))
    }
}
