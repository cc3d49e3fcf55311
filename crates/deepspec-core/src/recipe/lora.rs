//! Section `train.lora` of a recipe.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Highest rank. A larger one is a mistake, which would exhaust memory.
const MAX_RANK: usize = 1024;

/// LoRA: the drafter of `init_from` stays as it is, and small matrices beside its linear layers learn. Keys are those of
/// PEFT's `LoraConfig`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LoraRecipe {
    /// Rank of the update of each weight.
    pub r: usize,
    /// The update is scaled by `lora_alpha / r`.
    pub lora_alpha: f64,
    /// Linear layers that learn, by the end of their names, such as `q_proj` or `layers.0.mlp.up_proj`; absent means all linear
    /// layers of the drafter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_modules: Option<Vec<String>>,
}

impl Default for LoraRecipe {
    fn default() -> Self {
        Self { r: 16, lora_alpha: 32.0, target_modules: None }
    }
}

impl LoraRecipe {
    /// Factor of the product of the two matrices, `lora_alpha / r`.
    pub fn scale(&self) -> f64 {
        self.lora_alpha / self.r as f64
    }

    /// Whether a module is among the targets: by its whole name or by the end of it, as in PEFT.
    pub fn is_target(&self, module: &str) -> bool {
        let ends = |target: &String| {
            module.strip_suffix(target.as_str()).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        self.target_modules.as_ref().is_none_or(|targets| targets.iter().any(ends))
    }

    /// Checks the values; the error is a key with its problem.
    pub(super) fn check(&self, has_init_from: bool, freezes: bool) -> Result<(), (&'static str, String)> {
        if self.r == 0 {
            return Err(("train.lora.r", "must be at least 1".into()));
        }
        if self.r > MAX_RANK {
            return Err(("train.lora.r", format!("{} is above the highest rank, {MAX_RANK}", self.r)));
        }
        if self.target_modules.as_ref().is_some_and(Vec::is_empty) {
            let problem = "names no module; leave it out for all linear layers";
            return Err(("train.lora.target_modules", problem.into()));
        }
        if !(self.lora_alpha > 0.0 && self.lora_alpha.is_finite()) {
            return Err(("train.lora.lora_alpha", format!("{} is no positive number", self.lora_alpha)));
        }
        if !has_init_from {
            let problem =
                "LoRA adapts a finished drafter; name it in train.init_from, or leave train.lora out";
            return Err(("train.lora", problem.into()));
        }
        if freezes {
            let problem = "with train.lora all weights of train.init_from are frozen; leave it out";
            return Err(("train.freeze", problem.into()));
        }
        Ok(())
    }
}
