//! Resolves the arguments of `run` once: model folders, tokenizer, drafter and settings.

use std::path::{Path, PathBuf};

use anyhow::Context;
use deepspec_core::cli::Verbosity;
use deepspec_cost::policy::Policy;
use deepspec_datasets::suites::{RequestTemplate, SuiteDir, TokenizedSuite};
use deepspec_drafters::{Drafter, MtpSettings};
use deepspec_engine::Sampling;
use deepspec_hub::{HubError, model_dir};
use deepspec_models::{ModelError, Weights};
use deepspec_text::ChatTokenizer;

use super::args::{Args, Switch};
use super::models::{self, DeviceAndDtype, Speculation};
use crate::calibration::Calibration;
use crate::checkpoint::write_mtp_of_target;
use crate::results::{DrafterIdentity, Settings, TargetIdentity};

/// A run whose arguments are resolved.
pub struct Setup {
    /// The target's folder.
    pub target_dir: PathBuf,
    /// The drafter's folder.
    pub draft_dir: Option<PathBuf>,
    /// The target's tokenizer.
    pub tokenizer: ChatTokenizer,
    /// Tokens that end an answer.
    pub stop_ids: Vec<i64>,
    /// Maximum number of tokens of a conversation.
    pub context: usize,
    /// Rows of the target's embedding.
    pub vocab_size: usize,
    /// Device and dtype of all models.
    pub place: DeviceAndDtype,
    /// The drafter and its identity.
    pub drafter: Option<(Box<dyn Drafter>, DrafterIdentity)>,
    /// Settings that the results record.
    pub settings: Settings,
}

impl Setup {
    /// Downloads models that are given by a hub id, and loads tokenizer and drafter.
    ///
    /// # Errors
    /// Usage errors, and models that cannot be loaded.
    pub fn resolve(args: &Args, place: DeviceAndDtype, verbosity: Verbosity) -> anyhow::Result<Self> {
        let fetch = |flag: &'static str, model: &str| {
            model_dir(model, None, verbosity).map_err(HubError::report).context(flag)
        };
        let target_dir = fetch("--target", &args.target)?;
        let draft_dir = match args.drafter_name() {
            Some(_) if args.drafts_with_mtp_of_target() => {
                let (dir, steps) = (
                    args.mtp_dir(),
                    args.max_draft_tokens.unwrap_or(MtpSettings::default().num_speculative_steps),
                );
                write_mtp_of_target(&target_dir, &args.target, steps, &dir, args.overwrite)
                    .context("--draft mtp")?;
                Some(dir)
            }
            Some(draft) => Some(fetch("--draft", draft)?),
            None => None,
        };
        let tokenizer = ChatTokenizer::load(&target_dir)?;
        let stop_ids = deepspec_models::stop_ids(&target_dir, tokenizer.eos_token_id())?;
        tokenizer.log_stop_tokens(&stop_ids);
        let (context, vocab_size) = models::context_and_vocab_size(&target_dir, &tokenizer)?;
        let load = |(name, dir): (&str, &Path)| {
            let drafter = models::load_drafter(dir, &target_dir, args, &tokenizer, place)?;
            let identity = models::drafter_identity(name, dir, drafter.as_ref())?;
            anyhow::Ok((drafter, identity))
        };
        let drafter = args.drafter_name().zip(draft_dir.as_deref()).map(load).transpose()?;
        let folders = [Some(target_dir.as_path()), draft_dir.as_deref()];
        let settings =
            resolve_settings(args, folders, place, drafter.as_ref().map(|(drafter, _)| drafter.as_ref()))?;
        warn_on_thinking_mismatch(draft_dir.as_deref(), settings.thinking);
        Ok(Self { target_dir, draft_dir, tokenizer, stop_ids, context, vocab_size, place, drafter, settings })
    }

    /// The template that turns conversations into requests.
    pub fn request_template(&self) -> RequestTemplate<'_> {
        let sizes = [self.context, self.vocab_size];
        request_template(&self.settings, &self.tokenizer, &self.stop_ids, sizes)
    }

    /// The drafter as a decoding pass takes it.
    pub fn speculation(&self) -> Option<Speculation<'_>> {
        self.drafter.as_ref().map(|(drafter, identity)| Speculation { drafter: drafter.as_ref(), identity })
    }

    /// Identity of the target for the results.
    ///
    /// # Errors
    /// Fails if the target's files cannot be read.
    pub fn target_identity(&self, name: &str) -> Result<TargetIdentity, ModelError> {
        models::target_identity(name, &self.target_dir, &self.tokenizer, self.stop_ids.clone())
    }
}

/// The template that turns conversations into requests with these settings. `context` is the maximum
/// number of tokens of a conversation; token ids are below `vocab_size`.
pub fn request_template<'a>(
    settings: &'a Settings,
    tokenizer: &'a ChatTokenizer,
    stop_ids: &'a [i64],
    [context, vocab_size]: [usize; 2],
) -> RequestTemplate<'a> {
    RequestTemplate {
        tokenizer,
        sampling: Sampling::new(settings.temperature, settings.seed),
        max_new_tokens: settings.max_new_tokens,
        thinking: settings.thinking,
        system_prompt: settings.system_prompt.as_deref(),
        stop_ids,
        context,
        vocab_size,
    }
}

/// The selected suites with their tokenized prompts.
///
/// # Errors
/// Usage errors for unknown suites, and suites that cannot be read.
pub fn load_suites(
    args: &Args,
    template: &RequestTemplate,
    settings: &Settings,
) -> anyhow::Result<Vec<TokenizedSuite>> {
    let folder = SuiteDir::open(&args.suites_dir)?;
    let selected = folder.select(&args.suites, &args.domains)?.into_iter();
    let prepare = |suite| template.prepare(folder.load(suite, settings.seed, args.limit)?);
    selected.map(prepare).collect()
}

fn resolve_settings(
    args: &Args,
    [target_dir, draft_dir]: [Option<&Path>; 2],
    place: DeviceAndDtype,
    drafter: Option<&dyn Drafter>,
) -> anyhow::Result<Settings> {
    let of_target = |dir| Weights::open_target(dir, "a model", place.device, place.kind);
    // A language model that drafts is read as a target is.
    let of_drafter = |dir| match deepspec_drafters::is_language_model(dir)? {
        true => of_target(dir),
        false => Weights::open(dir, "a drafter", place.device, place.kind),
    };
    let weights = [target_dir.map(of_target), draft_dir.map(of_drafter)];
    let values = weights.into_iter().flatten().map(|weights| Ok(weights?.value_count()));
    let values = values.sum::<Result<usize, ModelError>>()?;
    let calibration = match (&args.calibration, draft_dir) {
        (Some(file), Some(draft)) => Some(Calibration::read(file)?.into_temperatures_for(file, draft)?),
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
        draft_sampling: args.draft_sampling.resolve(drafter, args.verify),
        verify: args.verify,
        slots: args.max_num_seqs,
        lanes: args.replicas(place.device, tch::get_num_threads() as usize, values)?,
        device: place.device_name(),
        dtype: place.dtype_name().into(),
        threads: tch::get_num_threads(),
    })
}

/// Warns if the run's thinking mode differs from that of the drafter's training data.
fn warn_on_thinking_mismatch(draft: Option<&Path>, thinking: bool) {
    let trained =
        draft.and_then(deepspec_drafters::trained_with_thinking).filter(|&trained| trained != thinking);
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
