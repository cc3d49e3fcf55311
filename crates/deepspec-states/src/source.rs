//! What a recipe says about its target states.

use std::path::PathBuf;

use deepspec_cache::{Encoding, Identity, Last, Layout, Tap};
use deepspec_core::recipe::Recipe;
use deepspec_models::{ModelConfig, config_digest, weights_digest};
use deepspec_text::{ChatTemplate, ChatTokenizer};

use crate::StatesError;

/// The source of a recipe's states, checked: everything but the target's weights.
pub struct Source {
    /// The target's folder.
    pub dir: PathBuf,
    /// The target's tokenizer.
    pub tokenizer: ChatTokenizer,
    /// Mask rules; their default system prompt is the recipe's.
    pub template: ChatTemplate,
    /// The target's architecture.
    pub config: ModelConfig,
    /// What the states are bound to.
    pub identity: Identity,
}

impl Source {
    /// Reads what `recipe` names and checks that it fits together.
    ///
    /// # Errors
    /// An unknown chat template, a folder that is no target, taps or a mask token outside the target, a tokenizer of
    /// another model. All of these are mistakes in the recipe or in what it points to.
    pub fn open(recipe: &Recipe) -> Result<Self, StatesError> {
        let mut template = named_template(&recipe.data.chat_template)?;
        template.default_system = recipe.data.default_system(template.default_system.as_deref());
        let dir = recipe.target_dir();
        let config = ModelConfig::load(&dir)?;
        check_fit(recipe, &config)?;
        let tokenizer = ChatTokenizer::load(&dir)?;
        let (ids, vocab_size) = (tokenizer.vocab_size(), config.vocab_size as usize);
        if ids > vocab_size {
            return Err(StatesError::Vocabulary { dir, ids, vocab_size });
        }
        let identity = identity(recipe, &tokenizer, &template, &config)?;
        Ok(Self { dir, tokenizer, template, config, identity })
    }

    /// The rows of a cache of these states.
    pub fn layout(&self, last: Last, encoding: Encoding) -> Layout {
        Layout { taps: self.identity.taps.clone(), hidden_size: self.identity.hidden_size, last, encoding }
    }
}

/// What the states of `recipe` are bound to. It does not matter whether `template` has its own default system prompt
/// or the recipe's already.
///
/// # Errors
/// If config.json or the weights cannot be read.
pub fn identity(
    recipe: &Recipe,
    tokenizer: &ChatTokenizer,
    template: &ChatTemplate,
    config: &ModelConfig,
) -> Result<Identity, StatesError> {
    let dir = recipe.target_dir();
    let model_type = config.raw.get("model_type").and_then(|value| value.as_str());
    Ok(Identity {
        model_type: model_type.unwrap_or_default().to_string(),
        target_config: config_digest(&dir)?,
        target_weights: weights_digest(&dir)?,
        tokenizer: tokenizer.tokenizer_digest().to_string(),
        template: tokenizer.template_digest(),
        chat_template: template.name.clone(),
        system_prompt: recipe.data.default_system(template.default_system.as_deref()),
        taps: taps(recipe)?,
        max_length: recipe.data.max_length,
        hidden_size: config.hidden_size as usize,
        vocab_size: config.vocab_size as usize,
    })
}

fn named_template(name: &str) -> Result<ChatTemplate, StatesError> {
    ChatTemplate::named(name).ok_or_else(|| {
        let known = ChatTemplate::names().join(", ");
        wrong("data.chat_template", format!("unknown chat template `{name}` (known: {known})"))
    })
}

fn check_fit(recipe: &Recipe, config: &ModelConfig) -> Result<(), StatesError> {
    let (dir, layers) = (&recipe.target.model, config.num_hidden_layers);
    if let Some(outside) = recipe.taps().into_iter().find(|&tap| tap >= layers as i64) {
        let problem = format!("{dir} has no layer {outside}; its layers are 0 to {}", layers - 1);
        return Err(wrong("target.layer_ids", problem));
    }
    let (mask, vocab_size) = (recipe.drafter.block().mask_token_id, config.vocab_size);
    if !(0..vocab_size).contains(&mask) {
        let problem = format!("{mask} is outside the vocabulary of {dir}, which ends at {}", vocab_size - 1);
        return Err(wrong("drafter.mask_token_id", problem));
    }
    Ok(())
}

fn taps(recipe: &Recipe) -> Result<Vec<Tap>, StatesError> {
    let tap = |id| {
        Tap::from_layer_id(id)
            .ok_or_else(|| wrong("target.layer_ids", format!("{id} is no layer of any target")))
    };
    recipe.taps().into_iter().map(tap).collect()
}

fn wrong(key: &'static str, problem: String) -> StatesError {
    StatesError::Recipe { key, problem }
}
