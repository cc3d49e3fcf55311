//! `eval`: accepted length, measured by generation during training.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Evaluation by decoding, every `logging.eval_every` steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EvalRecipe {
    /// Names of the suites, or files of `{"turns": […]}` rows.
    pub suites: Vec<String>,
    /// Folder with their files.
    pub suites_dir: String,
    /// Samples of each suite at most; absent means all that count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Tokens generated per sample at most.
    pub max_new_tokens: usize,
    /// Samples decoded at once.
    pub slots: usize,
    /// Divides the logits; 0 always takes the likeliest token.
    pub temperature: f64,
    /// Seed of all random draws, including the choice of rows of a capped suite.
    pub seed: u64,
}

impl Default for EvalRecipe {
    fn default() -> Self {
        Self {
            suites: ["smoke-math", "smoke-code", "smoke-chat"].map(String::from).into(),
            suites_dir: "eval_datasets".into(),
            limit: Some(16),
            max_new_tokens: 256,
            slots: 16,
            temperature: 1.0,
            seed: 980_406,
        }
    }
}

impl EvalRecipe {
    /// Checks the values; the error is a key with its problem.
    pub(super) fn check(&self) -> Result<(), (&'static str, String)> {
        if self.suites.is_empty() {
            return Err(("eval.suites", "name at least one suite".into()));
        }
        let counts = [
            ("eval.limit", self.limit.unwrap_or(1)),
            ("eval.max_new_tokens", self.max_new_tokens),
            ("eval.slots", self.slots),
        ];
        if let Some((key, _)) = counts.iter().find(|(_, count)| *count == 0) {
            return Err((key, "must be at least 1".into()));
        }
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return Err(("eval.temperature", format!("{} is no number from 0", self.temperature)));
        }
        Ok(())
    }
}
