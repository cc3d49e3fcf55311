//! Decodes the prompts, which gives the accepted length and the target's answers.

use std::path::Path;

use deepspec_core::usage;
use deepspec_datasets::suites::RequestTemplate;
use deepspec_drafters::{Drafter, DrafterOptions};
use deepspec_engine::{DraftSampling, Engine, EngineOptions, Sampling, VerifyRule};
use deepspec_models::{ModelConfig, TargetModel, TargetOptions};
use deepspec_text::ChatTokenizer;

use super::{Args, DECODE_SLOTS, DeviceAndDtype};

/// System message that the released recipes add to conversations without one.
const SYSTEM_PROMPT: &str = "You are a helpful assistant.";

/// Options of the chat template for all prompts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptOptions {
    /// `enable_thinking` of the chat template.
    pub thinking: bool,
    /// System message before every prompt.
    pub system_prompt: Option<String>,
}

impl PromptOptions {
    /// Variants of these options, each of which differs in one option.
    pub fn variants(&self) -> Vec<Self> {
        let system_prompt = match &self.system_prompt {
            Some(_) => None,
            None => Some(SYSTEM_PROMPT.to_string()),
        };
        vec![Self { thinking: !self.thinking, ..self.clone() }, Self { system_prompt, ..self.clone() }]
    }

    /// The options in words.
    pub fn description(&self) -> String {
        let thinking = if self.thinking { "on" } else { "off" };
        let system = self
            .system_prompt
            .as_ref()
            .map_or("no system message".into(), |text| format!("system message {text:?}"));
        format!("thinking {thinking}, {system}")
    }
}

/// Result of decoding all prompts with one set of options.
pub struct PromptRun {
    /// The options of the run.
    pub prompt_options: PromptOptions,
    /// Token ids of prompt and answer of every sample, and the number of prompt tokens.
    pub answers: Vec<(Vec<i64>, usize)>,
    /// Tokens committed by each cycle.
    pub cycles: Vec<f64>,
}

impl PromptRun {
    /// Accepted length τ, and its standard error.
    pub fn accepted_length(&self) -> (f64, f64) {
        let count = self.cycles.len() as f64;
        if self.cycles.is_empty() {
            return (1.0, f64::INFINITY);
        }
        let mean = self.cycles.iter().sum::<f64>() / count;
        let spread =
            self.cycles.iter().map(|length| (length - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
        (mean, (spread / count).sqrt())
    }
}

/// Builds requests from prompts and decodes them.
pub struct PromptDecoder<'a> {
    pub args: &'a Args,
    pub tokenizer: &'a ChatTokenizer,
    pub stop_ids: &'a [i64],
    pub config: &'a ModelConfig,
}

/// An engine with target and drafter.
///
/// # Errors
/// Fails if one of them cannot be loaded.
pub fn load_engine(
    target: &Path,
    draft: &Path,
    (device, kind): DeviceAndDtype,
    context: usize,
    draft_sampling: DraftSampling,
) -> anyhow::Result<Engine<TargetModel, Box<dyn Drafter>>> {
    let drafter = deepspec_drafters::load_drafter(
        draft,
        &DrafterOptions { device, kind, slots: DECODE_SLOTS, target: Some(target.to_path_buf()) },
    )?;
    let taps = drafter.taps().to_vec();
    let target = TargetModel::load(target, &TargetOptions { device, kind, slots: DECODE_SLOTS, taps })?;
    let options = EngineOptions {
        slots: DECODE_SLOTS,
        context,
        max_draft_tokens: None,
        draft_sampling,
        verify_rule: VerifyRule::Token,
        counts_overrun: true,
    };
    Ok(Engine::new(target, Some(drafter), options))
}

impl PromptDecoder<'_> {
    /// Decodes all prompts with the options `prompt_options`.
    ///
    /// # Errors
    /// Fails if the template refuses a prompt, or if the target's logits are not finite.
    pub fn decode(
        &self,
        engine: &mut Engine<TargetModel, Box<dyn Drafter>>,
        prompt_options: PromptOptions,
    ) -> anyhow::Result<PromptRun> {
        let asking = RequestTemplate {
            tokenizer: self.tokenizer,
            sampling: Sampling::new(self.args.temperature, self.args.seed),
            max_new_tokens: self.args.max_new_tokens,
            thinking: prompt_options.thinking,
            system_prompt: prompt_options.system_prompt.as_deref(),
            stop_ids: self.stop_ids,
            context: self.config.max_position_embeddings,
            vocab_size: self.config.vocab_size as usize,
        };
        let (mut answers, mut cycles) = (vec![], vec![]);
        for rows in self.args.rows()? {
            let requests = asking.prepare(rows)?.requests;
            let prompts: Vec<Vec<i64>> = requests.iter().map(|request| request.prompt.clone()).collect();
            for (prompt, done) in prompts.into_iter().zip(engine.run(requests, |_| {})?) {
                let length = prompt.len();
                cycles.extend(done.cycles.iter().map(|cycle| f64::from(cycle.committed)));
                answers.push(([prompt, done.tokens].concat(), length));
            }
        }
        if cycles.is_empty() {
            usage!("no prompt was answered with more than one token: choose other suites");
        }
        Ok(PromptRun { prompt_options, answers, cycles })
    }
}
