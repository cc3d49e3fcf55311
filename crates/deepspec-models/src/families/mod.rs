//! Families of targets: each reads a config.json into the facts of its layers.

mod draft;
mod gemma4;
mod qwen3;
mod rope;

use std::fmt;

use crate::config::{Fields, ModelConfig};
use crate::{ModelError, Weights};

/// `layer_types` of layers with a window.
pub const SLIDING: &str = "sliding_attention";
/// `layer_types` of layers that see everything.
pub const FULL: &str = "full_attention";

/// Which layers have a window by `layer_types`; None without that key.
///
/// # Errors
/// If the key holds another number of types, or an unknown one.
fn sliding_layers(fields: &Fields, layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(types) = fields.texts("layer_types")? else { return Ok(None) };
    if types.len() != layers {
        let problem = format!("{} types for {layers} layers", types.len());
        return Err(fields.error("layer_types", problem));
    }
    let sliding = |name: &String| match name.as_str() {
        FULL => Ok(false),
        SLIDING => Ok(true),
        other => {
            let problem = format!("\"{other}\" is unknown; expected \"{SLIDING}\" or \"{FULL}\"");
            Err(fields.error("layer_types", problem))
        }
    };
    types.iter().map(sliding).collect::<Result<_, _>>().map(Some)
}

/// A family of causal language models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Qwen3, dense.
    Qwen3,
    /// The text part of Gemma 4, dense.
    Gemma4,
}

impl Family {
    /// Reads a config.json of any known family.
    ///
    /// # Errors
    /// If the family is unknown, a key is missing or has a wrong type, or names a feature that is not supported.
    pub fn read(fields: &Fields) -> Result<ModelConfig, ModelError> {
        let model_type = fields.text("model_type")?;
        match model_type.as_deref() {
            Some("qwen3") => qwen3::read(fields),
            Some("gemma4" | "gemma4_text" | "gemma4_unified" | "gemma4_unified_text") => gemma4::read(fields),
            other => {
                let found = other
                    .map_or_else(|| "missing".to_string(), |other| format!("\"{other}\" is not supported"));
                let problem = format!(
                    "{found}; expected \"qwen3\", \"gemma4\", \"gemma4_text\", \"gemma4_unified\" or \"gemma4_unified_text\""
                );
                Err(fields.error("model_type", problem))
            }
        }
    }

    /// The class whose checkpoints are read, for messages.
    pub fn class(self) -> &'static str {
        match self {
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Gemma4 => "Gemma4ForConditionalGeneration or Gemma4ForCausalLM",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Qwen3 => "Qwen3",
            Self::Gemma4 => "Gemma 4",
        })
    }
}

/// What a checkpoint calls the language model's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Names {
    /// Before `embed_tokens`, `layers` and `norm`.
    pub body: &'static str,
    /// The head.
    pub head: &'static str,
}

impl Names {
    /// The names used in `weights`: those of a plain language model, or of one within a multimodal model. Tensors of other
    /// parts are never looked at.
    pub fn of(weights: &Weights) -> Self {
        const PLAIN: Names = Names { body: "model.", head: "lm_head.weight" };
        let known = [
            PLAIN,
            Self { body: "model.language_model.", head: "lm_head.weight" },
            Self { body: "language_model.model.", head: "language_model.lm_head.weight" },
        ];
        let there = |names: &Self| weights.contains(&format!("{}embed_tokens.weight", names.body));
        known.into_iter().find(there).unwrap_or(PLAIN)
    }
}
