//! Training that begins from another run's weights.

use std::path::Path;

use deepspec_core::cli::UsageError;
use tch::Kind;

use super::Algorithm;
use super::block::BlockConfig;
use super::checkpoint::is_frozen_end;
use super::eagle3::Eagle3Config;
use super::learner::Learner;
use super::trained::TrainedConfig;
use crate::{ModelConfig, ModelError, Weights};

/// A setting that shapes the weights: what it is in the checkpoint, and what the recipe asks for.
struct Setting {
    key: &'static str,
    there: String,
    here: String,
}

fn setting<T: std::fmt::Debug>(key: &'static str, there: &T, here: &T) -> Setting {
    Setting { key, there: format!("{there:?}"), here: format!("{here:?}") }
}

impl Learner {
    /// Takes over the weights of the drafter checkpoint in `dir`. Heads that its drafter does not have stay fresh, so that
    /// DSpark may start from DFlash; gives the names of these parameters. The embedding and the head stay the target's.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] naming every setting that differs otherwise; any other error if `dir` is no whole checkpoint.
    pub fn start_from(&self, dir: &Path) -> Result<Vec<String>, ModelError> {
        let misfit = |problem: String| {
            ModelError::Mismatch(UsageError(format!("train.init_from: {}: {problem}", dir.display())))
        };
        let (settings, may_be_fresh) = match (Algorithm::of(dir)?, self) {
            (Algorithm::Block, Self::Block { block, .. }) => {
                let (there, here) = (BlockConfig::load(dir)?, block.config());
                let mut fresh = vec![];
                if there.markov.is_none() {
                    fresh.push("markov_head.");
                }
                if there.confidence.is_none() {
                    fresh.push("confidence_head.");
                }
                (of_block(&there, here), fresh)
            }
            (Algorithm::Eagle3, Self::Eagle3 { model, .. }) => {
                (of_eagle3(&Eagle3Config::load(dir)?, model.config()), vec![])
            }
            (there, _) => {
                let problem = format!("it holds {there}, the recipe asks for another kind of drafter");
                return Err(misfit(problem));
            }
        };
        let differing: Vec<String> = settings
            .iter()
            .filter(|setting| setting.there != setting.here)
            .map(|Setting { key, there, here }| format!("{key} {there} there, {here} here"))
            .collect();
        if !differing.is_empty() {
            return Err(misfit(format!(
                "another drafter than the recipe asks for: {}",
                differing.join("; ")
            )));
        }
        let _guard = tch::no_grad_guard();
        let weights = Weights::open(dir, "drafter", self.device(), Kind::Float)?;
        let mut fresh = vec![];
        for (name, mut tensor) in self.checkpoint() {
            if is_frozen_end(&name) {
                continue;
            }
            if !weights.contains(&name) && may_be_fresh.iter().any(|head| name.starts_with(head)) {
                fresh.push(name);
                continue;
            }
            tensor.copy_(&weights.get(&name, &tensor.size())?);
        }
        let unread: Vec<String> = weights.unread().into_iter().filter(|name| !is_frozen_end(name)).collect();
        if unread.is_empty() {
            return Ok(fresh);
        }
        Err(misfit(format!("the recipe's drafter has no use for its tensors {}", unread.join(", "))))
    }
}

fn of_model(there: &ModelConfig, here: &ModelConfig) -> Vec<Setting> {
    let mut settings = vec![
        setting("family", &there.family, &here.family),
        setting("hidden_size", &there.hidden_size, &here.hidden_size),
        setting("vocab_size", &there.vocab_size, &here.vocab_size),
        setting("num_draft_layers", &there.layers.len(), &here.layers.len()),
    ];
    if let Some((there, here)) = there.layers.iter().zip(&here.layers).find(|(there, here)| there != here) {
        settings.extend([
            setting("intermediate_size", &there.intermediate_size, &here.intermediate_size),
            setting("attention", &there.attention, &here.attention),
            setting("rope", &there.rope, &here.rope),
            setting("rms_norm_eps", &there.eps, &here.eps),
        ]);
    }
    settings
}

fn of_block(there: &BlockConfig, here: &BlockConfig) -> Vec<Setting> {
    let mut settings = of_model(&there.model, &here.model);
    settings.extend([
        setting("target_layer_ids", &there.target_layer_ids, &here.target_layer_ids),
        setting("num_target_layers", &there.num_target_layers, &here.num_target_layers),
        setting("block_size", &there.block_size, &here.block_size),
        setting("mask_token_id", &there.mask_token_id, &here.mask_token_id),
    ]);
    if there.markov.is_some() {
        settings.push(setting("markov", &there.markov, &here.markov));
    }
    if there.confidence.is_some() {
        settings.push(setting("confidence", &there.confidence, &here.confidence));
    }
    settings
}

fn of_eagle3(there: &Eagle3Config, here: &Eagle3Config) -> Vec<Setting> {
    let mut settings = of_model(&there.model, &here.model);
    settings.extend([
        setting("target_layer_ids", &there.target_layer_ids, &here.target_layer_ids),
        setting("num_target_layers", &there.num_target_layers, &here.num_target_layers),
    ]);
    settings
}
