//! Training that starts from the weights of another run.

use std::fmt::Debug;
use std::path::Path;

use deepspec_core::Tap;
use deepspec_core::cli::UsageError;
use deepspec_models::{ModelConfig, ModelError, Weights};
use tch::Kind;

use super::checkpoint::is_embed_or_head;
use super::{DraftModel, DrafterConfig, DrafterKind};
use crate::registry::checkpoints_like;

/// Settings that decide whether weights can be loaded.
#[derive(Default)]
pub struct WarmStart {
    settings: Vec<Setting>,
    /// Prefixes of parameters that may stay random, because the other drafter lacks them.
    pub may_be_fresh: Vec<&'static str>,
}

/// A setting that shapes the weights, in the checkpoint and in the recipe.
struct Setting {
    key: &'static str,
    there: String,
    here: String,
}

impl WarmStart {
    /// Requires equal values.
    pub fn compare<T: Debug>(&mut self, key: &'static str, there: &T, here: &T) {
        self.settings.push(Setting { key, there: format!("{there:?}"), here: format!("{here:?}") });
    }

    /// Requires equal values, as text.
    pub fn compare_words(&mut self, key: &'static str, there: String, here: String) {
        self.settings.push(Setting { key, there, here });
    }

    fn decoders(&mut self, there: &ModelConfig, here: &ModelConfig) {
        self.compare("family", &there.family, &here.family);
        self.compare("hidden_size", &there.hidden_size, &here.hidden_size);
        self.compare("vocab_size", &there.vocab_size, &here.vocab_size);
        self.compare("num_draft_layers", &there.layers.len(), &here.layers.len());
        if let Some((there, here)) = there.layers.iter().zip(&here.layers).find(|(there, here)| there != here)
        {
            self.compare("intermediate_size", &there.intermediate_size, &here.intermediate_size);
            self.compare_words("attention", there.attention.to_string(), here.attention.to_string());
            self.compare_words("rope", there.rope.to_string(), here.rope.to_string());
            self.compare("rms_norm_eps", &there.eps, &here.eps);
        }
    }

    fn differences(&self) -> Vec<String> {
        let differing = self.settings.iter().filter(|setting| setting.there != setting.here);
        differing.map(|Setting { key, there, here }| format!("{key} {there} there, {here} here")).collect()
    }
}

impl<K: DrafterKind> DraftModel<K> {
    /// See [`crate::TrainableDrafter::load_pretrained`].
    pub(super) fn load_pretrained(&self, dir: &Path) -> Result<Vec<String>, ModelError> {
        let misfit = |problem: String| {
            ModelError::Mismatch(UsageError(format!("train.init_from: {}: {problem}", dir.display())))
        };
        let (found, here) = (checkpoints_like(dir)?, self.config());
        if !(found.classes)().contains(&here.architecture()) {
            let problem = format!("it holds {}, the recipe asks for another kind of drafter", found.hold);
            return Err(misfit(problem));
        }
        let there = K::Config::load(dir)?;
        let mut transfer = WarmStart::default();
        transfer.decoders(there.model(), here.model());
        let (theirs, own) = (there.decoder(), here.decoder());
        transfer.compare("target_layer_ids", &Tap::layer_ids(&theirs.taps), &Tap::layer_ids(&own.taps));
        transfer.compare("num_target_layers", &theirs.num_target_layers, &own.num_target_layers);
        here.compare_for_warm_start(&there, &mut transfer);
        let differing = transfer.differences();
        if !differing.is_empty() {
            return Err(misfit(format!(
                "another drafter than the recipe asks for: {}",
                differing.join("; ")
            )));
        }
        let _guard = tch::no_grad_guard();
        let weights = Weights::open(dir, "drafter", self.device(), Kind::Float)?;
        weights.check_finite()?;
        let mut fresh = vec![];
        for (name, mut tensor) in self.checkpoint() {
            if is_embed_or_head(&name) {
                continue;
            }
            if !weights.contains(&name) && transfer.may_be_fresh.iter().any(|part| name.starts_with(part)) {
                fresh.push(name);
                continue;
            }
            tensor.copy_(&weights.get(&name, &tensor.size())?);
        }
        let unread: Vec<String> =
            weights.unread().into_iter().filter(|name| !is_embed_or_head(name)).collect();
        if unread.is_empty() {
            return Ok(fresh);
        }
        Err(misfit(format!("the recipe's drafter has no use for its tensors {}", unread.join(", "))))
    }
}
