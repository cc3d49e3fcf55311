//! The tokenizer and mask rules of an inspection.

use std::collections::HashSet;
use std::path::Path;

use anyhow::Context;
use deepspec_capture::{StatesError, chat_template, check_template_tags, mask_rules};
use deepspec_core::cli::{UsageError, Verbosity};
use deepspec_core::recipe::{DEFAULT_MAX_LENGTH, TemplateRecipe};
use deepspec_core::usage;
use deepspec_hub::{HubError, ModelFiles, model_files};
use deepspec_models::{ModelConfig, chat_formats, stop_ids};
use deepspec_text::{ChatTemplate, ChatTokenizer, MaskRule};

use super::args::MaskArgs;

/// Settings that determine a row's mask.
pub struct MaskSettings {
    /// The target's tokenizer with its chat template.
    pub tokenizer: ChatTokenizer,
    /// The mask rules.
    pub template: ChatTemplate,
    /// Alternative rules for comparison: the template's `{% generation %}` tags if the rules are
    /// markers, and markers if the rules are tags.
    pub other: Option<ChatTemplate>,
    /// Maximal length of a row in tokens.
    pub max_length: usize,
    /// The drafter's mask token. None if the recipe has no mask token.
    pub mask_token: Option<i64>,
    /// Whether there is a recipe.
    pub has_recipe: bool,
    /// Reserved ids that end no answer: one that no row has may be a mask token.
    pub mask_candidates: HashSet<i64>,
    /// Vocabulary size of the target's embedding, if its config can be read.
    pub vocab_size: Option<usize>,
}

impl MaskSettings {
    /// Loads the recipe and the target's tokenizer.
    ///
    /// # Errors
    /// With a usage error if there is no such model, or no rules for its template. Also if the hub
    /// fails.
    pub fn new(args: &MaskArgs, verbosity: Verbosity) -> anyhow::Result<Self> {
        let recipe = match &args.config {
            Some(config) => Some(deepspec_drafters::load_recipe(config, &args.overrides)?),
            None => None,
        };
        let (model, revision) = match (&args.model, &recipe) {
            (Some(model), _) => (model.as_str(), None),
            (None, Some(recipe)) => (recipe.target.model.as_str(), recipe.target.revision.as_deref()),
            (None, None) => usage!("give --model or --config"),
        };
        let dir = model_files(model, revision, ModelFiles::Config, verbosity);
        let dir = dir.map_err(HubError::report).context("the model")?;
        let tokenizer = ChatTokenizer::load(&dir).map_err(|error| UsageError(error.to_string()))?;
        let template = match (&recipe, &args.chat_template) {
            (Some(recipe), _) => chat_template(recipe).map_err(|error| UsageError(error.to_string()))?,
            (None, Some(name)) => template_from_name(name)?,
            (None, None) => detect_template(&tokenizer)?,
        };
        check_template_tags(&template, &tokenizer).map_err(UsageError)?;
        let other = match template.rule {
            MaskRule::Generation => {
                ChatTemplate::guess(&tokenizer, &chat_formats()).filter(|guess| guess.markers().is_some())
            }
            MaskRule::Markers(_) => tokenizer
                .has_generation_tags()
                .then(|| ChatTemplate { rule: MaskRule::Generation, ..template.clone() }),
        };
        let other =
            other.map(|other| ChatTemplate { default_system: template.default_system.clone(), ..other });
        let mask_token = recipe.as_ref().and_then(|recipe| recipe.drafter.mask_token_id());
        let has_recipe = recipe.is_some();
        let own = recipe.map_or(DEFAULT_MAX_LENGTH, |recipe| recipe.data.max_length);
        let max_length = args.max_length.unwrap_or(own);
        let vocab_size = ModelConfig::load_any(&dir).ok().map(|config| config.vocab_size as usize);
        let mask_candidates = mask_candidates(&tokenizer, &dir, vocab_size);
        Ok(Self {
            tokenizer,
            template,
            other,
            max_length,
            mask_token,
            has_recipe,
            mask_candidates,
            vocab_size,
        })
    }
}

fn mask_candidates(tokenizer: &ChatTokenizer, dir: &Path, vocab_size: Option<usize>) -> HashSet<i64> {
    let stops = stop_ids(dir, tokenizer.eos_token_id()).unwrap_or_default();
    let ids = 0..vocab_size.unwrap_or(tokenizer.vocab_size()) as i64;
    ids.filter(|id| tokenizer.is_reserved(*id) && !stops.contains(id)).collect()
}

fn template_from_name(name: &str) -> anyhow::Result<ChatTemplate> {
    let template = TemplateRecipe::Name(name.to_owned()).resolve()?;
    match mask_rules(&template) {
        Ok(template) => Ok(template),
        Err(StatesError::Recipe { problem, .. }) => usage!("--chat-template: {problem}"),
        Err(error) => Err(error.into()),
    }
}

fn detect_template(tokenizer: &ChatTokenizer) -> anyhow::Result<ChatTemplate> {
    let Some(template) = ChatTemplate::guess(tokenizer, &chat_formats()) else {
        usage!(
            "the model's chat template writes none of the marks that are built in ({}); give --chat-template FILE.yaml with `name`, `assistant_header` and `end_of_turn`",
            ChatTemplate::known_names(&chat_formats()).join(", ")
        );
    };
    tracing::info!("using the mask rules `{}`, which fit the model's chat template", template.name);
    Ok(template)
}
