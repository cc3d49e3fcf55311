//! Families of targets: each is described in a file of its own, which a line in `FAMILIES` makes known.

mod draft;
mod gemma4;
mod llama;
mod pre_norm;
mod qwen3;
mod rope;

use std::fmt;

use serde_json::{Map, Value};

use crate::config::{Fields, ModelConfig};
use crate::nn::LayerSpec;
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

/// A config.json.
type RawConfig = Map<String, Value>;

/// A family of causal language models, as its file announces it.
pub struct TargetFamily {
    /// Names it to people.
    pub name: &'static str,
    /// Begins the classes of drafters whose layers are like its own, as in `Qwen3DSparkModel`.
    pub prefix: &'static str,
    /// What `model_type` of its configs says.
    pub model_types: &'static [&'static str],
    /// Classes of its checkpoints, as `architectures` names them.
    pub classes: &'static [&'static str],
    /// Reads a config.json.
    read: fn(&Fields) -> Result<ModelConfig, ModelError>,
    /// The config.json of a decoder of these layers, from a target's.
    draft_config: fn(&RawConfig, &[LayerSpec]) -> RawConfig,
    /// Why a decoder cannot have draft layers with these windows; None where it can.
    refuse_windows: fn(&[Option<usize>]) -> Option<&'static str>,
}

/// One of [`families`].
pub type Family = &'static TargetFamily;

const FAMILIES: [Family; 3] = [&qwen3::FAMILY, &gemma4::FAMILY, &llama::FAMILY];

/// All families that are known.
pub fn families() -> impl Iterator<Item = Family> {
    FAMILIES.into_iter()
}

impl TargetFamily {
    /// Reads a config.json of any known family.
    ///
    /// # Errors
    /// If the family is unknown, a key is missing or has a wrong type, or names a feature that is not supported.
    pub(crate) fn read_any(fields: &Fields) -> Result<ModelConfig, ModelError> {
        let found = fields.text("model_type")?;
        let is_meant =
            |family: &Family| found.as_deref().is_some_and(|found| family.model_types.contains(&found));
        if let Some(family) = families().find(is_meant) {
            return (family.read)(fields);
        }
        let found =
            found.map_or_else(|| "missing".to_string(), |other| format!("\"{other}\" is not supported"));
        let known: Vec<String> =
            families().flat_map(|family| family.model_types).map(|name| format!("\"{name}\"")).collect();
        let (last, others) = known.split_last().map_or(("", &known[..]), |(last, others)| (last, others));
        Err(fields.error("model_type", format!("{found}; expected {} or {last}", others.join(", "))))
    }

    /// The classes whose checkpoints are read, for messages.
    pub fn class(&self) -> String {
        self.classes.join(" or ")
    }
}

impl PartialEq for TargetFamily {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for TargetFamily {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl fmt::Display for TargetFamily {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name)
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
