//! Resolves the target, tokenizer and chat template of a recipe.

use std::path::{Path, PathBuf};

use crate::cache::{Encoding, FinalStates, Identity, Layout, Manifest};
use deepspec_core::cli::Verbosity;
use deepspec_core::env;
use deepspec_core::recipe::{StateServers, TargetRecipe, TemplateRecipe};
use deepspec_drafters::DrafterPlan;
use deepspec_drafters::Recipe;
use deepspec_hub::{ModelFiles, model_files};
use deepspec_models::config::read_json;
use deepspec_models::{
    ModelConfig, ModelError, chat_formats, config_digest, final_state_factor, outer_tensors_digest,
    probed_weights_digest, weights_digest,
};
use deepspec_text::{ChatTemplate, ChatTokenizer};

use crate::StatesError;
use crate::served::{AnswerStates, ServeCommand};

/// A recipe's resolved and checked inputs for hidden states, without the target's weights.
pub struct TargetSpec {
    /// The target, as the recipe describes it.
    pub target: TargetRecipe,
    /// Folder of the target.
    pub dir: PathBuf,
    /// Tokenizer of the target.
    pub tokenizer: ChatTokenizer,
    /// Mask rules, with the recipe's default system prompt.
    pub template: ChatTemplate,
    /// Architecture of the target; that of drafters for it if servers compute its states.
    pub config: ModelConfig,
    /// Identity of the hidden states.
    pub identity: Identity,
    /// Which final hidden states the drafter trains on.
    pub final_states: FinalStates,
    /// The states that vLLM returned with the answers; `None` if they are computed.
    pub answers: Option<AnswerStates>,
    /// Whether the drafter trains on the final hidden state of a sample's last token.
    pub reads_last_token_state: bool,
}

impl TargetSpec {
    /// Resolves the inputs of `recipe`, downloads a target given by hub id, and checks that they
    /// fit together.
    ///
    /// # Errors
    /// Fails on an unknown chat template, or one whose tags the tokenizer's template lacks. Fails
    /// if the folder is not a target, and if taps, mask token or length do not fit the target.
    /// These are mistakes in the recipe or its inputs. Also fails if the hub fails.
    pub fn open(recipe: &Recipe, verbosity: Verbosity) -> Result<Self, StatesError> {
        let template = chat_template(recipe)?;
        let dir = model_files(
            &recipe.target.model,
            recipe.target.revision.as_deref(),
            needed_files(recipe),
            verbosity,
        )?;
        let config = load_config(recipe, &dir)?;
        let drafter = check_recipe_fits(recipe, &config)?;
        let (final_states, reads_last_token_state) =
            (drafter.final_states(), drafter.reads_last_token_state());
        let tokenizer = ChatTokenizer::load(&dir)?;
        check_template_tags(&template, &tokenizer)
            .map_err(|problem| recipe_error("data.chat_template", problem))?;
        tokenizer.warn_if_wider_than(config.vocab_size as usize);
        warn_ordinary_mask_token(recipe, &tokenizer);
        let mut identity = identity(recipe, &dir, &tokenizer, &template, &config)?;
        accept_other_weights_digest(&mut identity, recipe.cache_dir(), &dir)?;
        let answers = recipe.data.states.answers.as_deref().map(env::expand_home).map(AnswerStates::new);
        let target = recipe.target.clone();
        Ok(Self {
            target,
            dir,
            tokenizer,
            template,
            config,
            identity,
            final_states,
            answers,
            reads_last_token_state,
        })
    }

    /// The command that starts a vLLM server for these states. `longest` is the number of tokens of
    /// the longest sample.
    ///
    /// # Errors
    /// If config.json cannot be read.
    pub fn serve_command(&self, servers: &StateServers, longest: usize) -> Result<ServeCommand, StatesError> {
        let layers = self.config.layers.len();
        Ok(ServeCommand::new(&self.target, &self.dir, layers, Some(servers), longest)?)
    }

    /// The row layout of a cache of these states.
    pub fn layout(&self, last: FinalStates, encoding: Encoding) -> Layout {
        Layout { taps: self.identity.taps.clone(), hidden_size: self.identity.hidden_size, last, encoding }
    }
}

/// Training on states from servers needs no layers, unless it decodes with the target in between, or the drafter
/// computes with some of them.
fn needed_files(recipe: &Recipe) -> ModelFiles {
    let needs_layers = recipe.logging.eval_every.is_some() || recipe.drafter.reads_target_layers();
    match recipe.data.states.come_from_engine() && !needs_layers {
        true => ModelFiles::WithoutLayers,
        false => ModelFiles::Whole,
    }
}

/// The target's config. A target that runs in this program needs a family here.
fn load_config(recipe: &Recipe, dir: &Path) -> Result<ModelConfig, ModelError> {
    match recipe.data.states.runs_target() {
        true => ModelConfig::load(dir),
        false => ModelConfig::load_any(dir),
    }
}

/// Warns if the mask token is an ordinary token, because it then also occurs in texts.
fn warn_ordinary_mask_token(recipe: &Recipe, tokenizer: &ChatTokenizer) {
    let Some(id) = recipe.drafter.mask_token_id() else { return };
    if let Some(token) = tokenizer.token(id).filter(|_| !tokenizer.is_reserved(id)) {
        tracing::warn!(
            "`mask_token_id` {id} is the ordinary token {token:?}, which texts hold too; choose a special or an unused one, as `deepspec-data inspect` lists them"
        );
    }
}

/// Keeps a cache valid that was built for this target with another digest of the weights: by an older
/// version, or with the other one of [`weights_digest`] and [`outer_tensors_digest`]. The function
/// takes over that digest.
fn accept_other_weights_digest(
    identity: &mut Identity,
    cache: Option<PathBuf>,
    target: &Path,
) -> Result<(), StatesError> {
    let Some(manifest) = cache.and_then(|dir| Manifest::read(&dir).ok()) else { return Ok(()) };
    let there = manifest.identity.target_weights;
    if there == identity.target_weights {
        return Ok(());
    }
    // A folder with missing shards has no digest of all weights.
    let is_same = |digest: Result<String, ModelError>| digest.is_ok_and(|digest| digest == there);
    if is_same(outer_tensors_digest(target))
        || is_same(weights_digest(target))
        || is_same(probed_weights_digest(target))
    {
        identity.target_weights = there;
    }
    Ok(())
}

/// Identity of the hidden states of `recipe`, whose target is in `dir`. `template` may have its own
/// default system prompt or the recipe's.
///
/// # Errors
/// Fails if config.json or the weights cannot be read.
pub fn identity(
    recipe: &Recipe,
    dir: &Path,
    tokenizer: &ChatTokenizer,
    template: &ChatTemplate,
    config: &ModelConfig,
) -> Result<Identity, StatesError> {
    let (_, raw) = read_json(dir)?;
    let model_type = raw.get("model_type").and_then(|value| value.as_str());
    Ok(Identity {
        model_type: model_type.unwrap_or_default().to_string(),
        target_config: config_digest(dir)?,
        target_weights: match recipe.data.states.come_from_engine() {
            true => served_digest(dir)?,
            false => weights_digest(dir)?,
        },
        tokenizer: tokenizer.tokenizer_digest().to_string(),
        template: template.digest(tokenizer, &chat_formats()),
        chat_template: template.name.clone(),
        system_prompt: recipe.data.default_system_prompt(template.default_system.as_deref()),
        taps: recipe.target.layer_ids.clone(),
        max_length: recipe.data.max_length,
        hidden_size: config.hidden_size as usize,
        vocab_size: config.vocab_size as usize,
    })
}

/// Digest of the tensors that make an engine's states to final states, and of the factor on the logits, which earlier versions left
/// out of the states.
fn served_digest(dir: &Path) -> Result<String, ModelError> {
    let (tensors, factor) = (outer_tensors_digest(dir)?, final_state_factor(dir)?);
    Ok(if factor == 1.0 { tensors } else { format!("{tensors}-times-{factor}") })
}

/// The mask rules of a recipe, with the recipe's default system prompt.
///
/// # Errors
/// As [`mask_rules`].
pub fn chat_template(recipe: &Recipe) -> Result<ChatTemplate, StatesError> {
    let mut template = mask_rules(&recipe.data.chat_template)?;
    template.default_system = recipe.data.default_system_prompt(template.default_system.as_deref());
    Ok(template)
}

/// The mask rules that a recipe names or contains.
///
/// # Errors
/// Fails if no rules have that name.
pub fn mask_rules(template: &TemplateRecipe) -> Result<ChatTemplate, StatesError> {
    let name = match template {
        TemplateRecipe::Entry(entry) => return Ok(entry.clone().into()),
        TemplateRecipe::Name(name) => name,
    };
    ChatTemplate::from_name(name, &chat_formats()).ok_or_else(|| {
        let problem = format!(
            "unknown chat template `{name}` ({}); rules of your own are an entry or a .yaml file",
            known_formats()
        );
        recipe_error("data.chat_template", problem)
    })
}

/// Checks that a tokenizer's template has the tags that the mask rules need.
///
/// # Errors
/// Names the missing tags and the known rules.
pub fn check_template_tags(template: &ChatTemplate, tokenizer: &ChatTokenizer) -> Result<(), String> {
    template.check_fits(tokenizer).map_err(|error| format!("{error} ({})", known_formats()))
}

fn known_formats() -> String {
    format!("known: {}", ChatTemplate::known_names(&chat_formats()).join(", "))
}

/// Checks that taps, drafter and length of a recipe fit a target of this architecture. Returns the
/// drafter.
///
/// # Errors
/// Names the wrong key of the recipe.
pub fn check_recipe_fits(recipe: &Recipe, config: &ModelConfig) -> Result<Box<dyn DrafterPlan>, StatesError> {
    let (dir, layers) = (&recipe.target.model, config.layers.len());
    if let Some(outside) = recipe.target.layer_ids.iter().find(|tap| !tap.is_within(layers)) {
        let problem = format!("{dir} has no layer {outside}; its layers are 0 to {}", layers - 1);
        return Err(recipe_error("target.layer_ids", problem));
    }
    let drafter = deepspec_drafters::plan_drafter(recipe, config)?;
    // vLLM samples one more token.
    let asked = recipe.data.max_length + usize::from(recipe.data.states.servers.is_some());
    let longest = config.max_position_embeddings;
    if asked > longest {
        let problem =
            format!("{asked} tokens are more than {dir} was made for (max_position_embeddings {longest})");
        return Err(recipe_error("data.max_length", problem));
    }
    Ok(drafter)
}

fn recipe_error(key: &'static str, problem: String) -> StatesError {
    StatesError::Recipe { key, problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafters_that_compute_with_layers_of_a_served_target_need_all_of_it() {
        let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
        let needed = |recipe: &str, states: &str| {
            let overrides = [format!("data.states={states}"), "data.input=[rows.jsonl]".into()];
            needed_files(&deepspec_drafters::load_recipe(&configs.join(recipe), &overrides).unwrap())
        };
        let served = "{server: 'http://127.0.0.1:8000'}";
        assert_eq!(needed("dspark/gemma4_12b.yaml", served), ModelFiles::WithoutLayers);
        assert_eq!(needed("dspark/gemma4_12b.yaml", "online"), ModelFiles::Whole);
        assert_eq!(needed("gemma4_assistant/gemma4_12b.yaml", served), ModelFiles::Whole);
    }
}
