//! Families of targets. Each family has one file and an entry in `FAMILIES`.

mod any;
mod draft;
mod experts;
mod gemma3;
mod gemma4;
mod gpt_oss;
mod granite;
mod llama;
mod mistral;
mod phi3;
mod pre_norm;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod rope;

use std::path::Path;

use deepspec_checkpoint::Fields;
use deepspec_text::ChatFormat;
use serde_json::{Map, Value};

use crate::config::{DraftLayers, Family, ModelConfig, TargetFamily, read_json};
use crate::{ModelError, Weights};

const FAMILIES: [Family; 12] = [
    &qwen3::FAMILY,
    &gemma4::FAMILY,
    &llama::FAMILY,
    &qwen2::FAMILY,
    &mistral::FAMILY,
    &granite::FAMILY,
    &gemma3::FAMILY,
    &phi3::FAMILY,
    &qwen3_moe::FAMILY,
    &gpt_oss::FAMILY,
    &qwen3_5::FAMILY,
    &qwen3_5_moe::FAMILY,
];

/// Layers of drafters for targets whose own layers no engine runs in a drafter: block drafters have those of Qwen3,
/// others those of Llama.
const QWEN3_OR_LLAMA: DraftLayers =
    DraftLayers::Other { blocks: &qwen3::FAMILY, tokens: &llama::FAMILY, own_mtp: false };

/// All known families.
pub fn families() -> impl Iterator<Item = Family> {
    FAMILIES.into_iter()
}

/// The chat formats of all families.
pub fn chat_formats() -> Vec<&'static ChatFormat> {
    families().filter_map(|family| family.chat.as_ref()).collect()
}

impl ModelConfig {
    /// Reads `dir/config.json` of a target, or of a drafter built like one.
    ///
    /// # Errors
    /// If the family is unknown, a key is missing or has a wrong type, or names a feature that is not supported.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        let (path, raw) = read_json(dir)?;
        Self::parse(&path, raw)
    }

    /// Parses an object that was read; `path` is for errors.
    ///
    /// # Errors
    /// As [`ModelConfig::load`].
    pub fn parse(path: &Path, raw: Map<String, Value>) -> Result<Self, ModelError> {
        let config = read_family(&Fields::new(path, &raw))?;
        Ok(Self { raw, ..config })
    }
}

/// Reads a config.json of any known family.
fn read_family(fields: &Fields) -> Result<ModelConfig, ModelError> {
    let found = fields.text("model_type")?;
    if let Some(family) = TargetFamily::of_model_type(found) {
        return (family.read)(fields);
    }
    let found = found.map_or_else(|| "missing".to_string(), |other| format!("\"{other}\" is not supported"));
    let known: Vec<String> =
        families().flat_map(|family| family.decoder.model_types).map(|name| format!("\"{name}\"")).collect();
    let (last, others) = known.split_last().map_or(("", &known[..]), |(last, others)| (last, others));
    let problem = format!(
        "{found}; expected {} or {last}; vLLM can compute the states of others (data.states: {{server: URL}})",
        others.join(", ")
    );
    Err(fields.error("model_type", problem).into())
}

impl TargetFamily {
    /// The family whose checkpoints have this `model_type`.
    pub(crate) fn of_model_type(model_type: Option<&str>) -> Option<Family> {
        families().find(|family| model_type.is_some_and(|name| family.decoder.model_types.contains(&name)))
    }
}

pub use any::{SHAPES_WITHOUT_FAMILY, text_model_type};
pub(crate) use any::{is_gemma, text_part};

/// Words in the names of a multimodal model's other modules, and of modules that draft (MTP).
const OTHER_MODULE_WORDS: [&str; 9] =
    ["vis", "image", "video", "audio", "multi_modal", "multimodal", "mm_", "projector", "mtp"];

/// Names of the language model's tensors in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorNames {
    /// Prefix of `embed_tokens`, `layers` and `norm`.
    pub body: &'static str,
    /// Name of the LM head's weight.
    pub head: &'static str,
}

impl TensorNames {
    /// The names used in `weights`: those of a plain language model, or of one within a multimodal model. Tensors of vision and audio parts
    /// are ignored.
    pub fn detect(weights: &Weights) -> Self {
        const PLAIN: TensorNames = TensorNames { body: "model.", head: "lm_head.weight" };
        let known = [
            PLAIN,
            Self { body: "model.language_model.", head: "lm_head.weight" },
            Self { body: "language_model.model.", head: "language_model.lm_head.weight" },
            // Saved from the base model, without the class that adds the LM head.
            Self { body: "", head: "lm_head.weight" },
        ];
        let there = |names: &Self| weights.contains(&format!("{}embed_tokens.weight", names.body));
        known.into_iter().find(there).unwrap_or(PLAIN)
    }

    /// Whether the language model may leave this tensor unread. Such a tensor belongs to another part (vision, audio), is
    /// rebuilt, or drafts tokens beyond the next one (MTP).
    pub fn may_stay_unread(&self, name: &str, is_tied: bool) -> bool {
        let mut modules = name.strip_prefix("model.").unwrap_or(name).split('.').take(2);
        let is_other_part = match self.body {
            "" | "model." => name.starts_with("mtp."),
            body => {
                !name.starts_with(body)
                    && modules.any(|module| OTHER_MODULE_WORDS.iter().any(|part| module.contains(part)))
            }
        };
        is_other_part || name.ends_with("rotary_emb.inv_freq") || (is_tied && name == self.head)
    }
}
