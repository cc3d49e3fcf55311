//! Which parameters of a drafter are trained: all but frozen ones, or LoRA's matrices.

use deepspec_core::recipe::LoraRecipe;
use deepspec_models::nn::StateDict;

use super::checkpoint::freeze_parameters;
use super::lora::{LoraAdapters, target_weights};
use crate::ParamCounts;

/// The parameters that `train.freeze` and `train.lora` leave to be trained; all by default.
#[derive(Debug, Clone, Default)]
pub struct TrainedParts {
    /// Prefixes of the names of frozen parameters.
    pub frozen: Vec<&'static str>,
    /// LoRA, and the names of the weights that it targets. All parameters of the model are frozen then.
    lora: Option<(LoraRecipe, Vec<String>)>,
}

impl TrainedParts {
    /// See [`DrafterPlan::set_lora`](crate::DrafterPlan::set_lora). `model` holds the drafter's parameters.
    ///
    /// # Errors
    /// The entry of `target_modules` that names no linear layer, with the names that exist.
    pub fn set_lora(&mut self, lora: LoraRecipe, model: &StateDict) -> Result<(), String> {
        let targets = target_weights(&lora, model)?;
        self.lora = Some((lora, targets));
        Ok(())
    }

    /// Freezes what is not trained in `model`, and makes LoRA's matrices if there are any.
    pub fn apply(&self, model: &mut StateDict, seed: u64) -> Option<LoraAdapters> {
        match &self.lora {
            Some((lora, targets)) => {
                freeze_parameters(model, |name| !targets.iter().any(|target| target == name));
                Some(LoraAdapters::new(lora, &model.parameters, seed))
            }
            None => {
                freeze_parameters(model, |name| self.is_frozen(name));
                None
            }
        }
    }

    /// Numbers of parameters of `model`.
    pub fn count(&self, model: StateDict) -> ParamCounts {
        let mut counts = ParamCounts { has_lora: self.lora.is_some(), ..ParamCounts::default() };
        for (name, tensor) in model.parameters {
            let is_frozen = self.lora.is_some() || self.is_frozen(&name);
            let count = if is_frozen { &mut counts.frozen } else { &mut counts.trainable };
            *count += tensor.numel();
            if let Some((lora, _)) = self.lora.as_ref().filter(|(_, targets)| targets.contains(&name)) {
                counts.lora_targets += tensor.numel();
                counts.largest_lora_target = counts.largest_lora_target.max(tensor.numel());
                counts.trainable += lora.r * tensor.size().iter().sum::<i64>() as usize;
            }
        }
        counts
    }

    /// Whether `train.freeze` freezes a parameter.
    fn is_frozen(&self, name: &str) -> bool {
        self.frozen.iter().any(|prefix| name.starts_with(prefix))
    }
}
