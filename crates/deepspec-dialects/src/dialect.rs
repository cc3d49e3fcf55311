//! Dialects: who is told by what, and how each spells names and config.

mod container;
mod reference;
mod speculators;

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use deepspec_core::{Slots, Tap};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::drafter::{Drafter, NOTES, Obstacle};
use crate::fields::Fields;
use crate::{DialectError, FAMILIES, Family, Target, Tensors};

/// A layout of checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// DeepSpec's and this project's own.
    Reference,
    /// vllm-project/speculators.
    Speculators,
    /// sgl-project/SpecForge.
    Specforge,
    /// z-lab/dflash.
    #[serde(rename = "z-lab")]
    Zlab,
    /// NVIDIA Model-Optimizer.
    Modelopt,
}

impl Dialect {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Reference, Self::Speculators, Self::Specforge, Self::Zlab, Self::Modelopt];

    /// Its name on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reference => "reference",
            Self::Speculators => "speculators",
            Self::Specforge => "specforge",
            Self::Zlab => "z-lab",
            Self::Modelopt => "modelopt",
        }
    }

    /// Whether its checkpoints hold the target's embedding and head.
    pub fn has_embed_and_head(self) -> bool {
        matches!(self, Self::Reference | Self::Speculators)
    }

    /// The reference's name of a tensor.
    pub(crate) fn canonical(self, name: &str) -> String {
        let renamed =
            |(theirs, ours): &(&str, &str)| name.strip_prefix(theirs).map(|rest| format!("{ours}{rest}"));
        self.renames().iter().find_map(renamed).unwrap_or_else(|| name.into())
    }

    /// What this dialect calls a tensor of the reference.
    pub(crate) fn spelled(self, name: &str) -> String {
        let renamed =
            |(theirs, ours): &(&str, &str)| name.strip_prefix(ours).map(|rest| format!("{theirs}{rest}"));
        self.renames().iter().find_map(renamed).unwrap_or_else(|| name.into())
    }

    /// Prefixes of this dialect and of the reference.
    fn renames(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Modelopt => &[
                ("markov_w1.", "markov_head.markov_w1."),
                ("markov_w2.", "markov_head.markov_w2."),
                ("gate_proj.", "markov_head.gate_proj."),
                ("joint_proj.", "markov_head.joint_proj."),
                ("confidence_proj.", "confidence_head.proj."),
            ],
            _ => &[],
        }
    }

    /// The config.json of a drafter that this dialect can say.
    pub(crate) fn config(
        self,
        drafter: &Drafter,
        target: Option<&Target>,
        dtype: &str,
    ) -> Map<String, Value> {
        let mut map = match self {
            Self::Reference => reference::config(drafter),
            Self::Speculators => speculators::config(drafter, target),
            Self::Specforge | Self::Zlab | Self::Modelopt => container::config(drafter, self),
        };
        map.insert("dtype".into(), dtype.into());
        map
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dialect {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|dialect| dialect.name() == name);
        found.ok_or_else(|| {
            format!("`{name}` is no dialect; expected {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// Tells the dialect of a config and its tensors, and reads the drafter.
///
/// # Errors
/// If it is no drafter of a known dialect, or a key is missing or wrong.
pub fn read(
    path: &Path,
    map: &Map<String, Value>,
    tensors: &Tensors,
) -> Result<(Dialect, Drafter), DialectError> {
    let fields = Fields::new(path, map);
    if map.contains_key("speculators_model_type") || map.contains_key("speculators_config") {
        return Ok((Dialect::Speculators, speculators::read(&fields, tensors)?));
    }
    if map.keys().any(|key| key.starts_with("dspark_")) {
        let problem = "the drafter lies within its target's checkpoint (SGLang's DeepSeek-V4 bundle), with layers of another \
                       architecture; there is nothing to convert";
        return Err(fields.error("dspark_block_size", problem));
    }
    let found = fields.required("architectures", fields.architecture()?)?;
    match found {
        "Qwen3DSparkModel" | "Gemma4DSparkModel" | "LlamaDSparkModel" | "Qwen3Eagle3Model"
        | "Gemma4Eagle3Model" | "LlamaEagle3Model" => {
            Ok((Dialect::Reference, reference::read(&fields, found)?))
        }
        "DSparkDraftModel" | "DFlashDraftModel" | "DominoDraftModel" => {
            container::read(&fields, found, tensors)
        }
        "LlamaForCausalLMEagle3" => Ok((Dialect::Specforge, container::read_eagle3(&fields)?)),
        other if other.ends_with("DFlash2Model") => {
            let problem = "DFlash 2 is neither inspected nor converted; `run`, `trace` and `checkpoint doctor` read it as it is";
            Err(fields.error("architectures", problem))
        }
        other => {
            let problem = format!(
                "\"{other}\" is no drafter of a known dialect; expected Qwen3DSparkModel, Gemma4DSparkModel, \
                 Qwen3Eagle3Model or Gemma4Eagle3Model (reference), LlamaDSparkModel or LlamaEagle3Model (the same with Llama \
                 layers), DSparkDraftModel (SpecForge), DFlashDraftModel (z-lab, \
                 SpecForge, ModelOpt), LlamaForCausalLMEagle3 (SpecForge), or a speculators_model_type"
            );
            Err(fields.error("architectures", problem))
        }
    }
}

/// The parts of a decoder's config that all dialects share.
struct Decoder {
    family: Family,
    map: Map<String, Value>,
    hidden_size: u64,
    vocab_size: u64,
    layers: u64,
    obstacles: Vec<Obstacle>,
}

/// More draft layers are a mistake.
const MAX_LAYERS: u64 = 1024;

/// Reads the decoder from `fields`, leaving out the keys that only their dialect knows.
fn decoder(fields: &Fields, foreign: &[&str]) -> Result<Decoder, DialectError> {
    let found = fields.text("model_type")?;
    let is_meant = |family: &&Family| found.is_some_and(|found| family.model_types.contains(&found));
    let Some(&family) = FAMILIES.iter().find(is_meant) else {
        let names = FAMILIES.map(|family| family.name).join(", ");
        let problem = format!("{found:?} is no known decoder; known are {names}");
        return Err(fields.error("model_type", problem));
    };
    let layers = fields.required_size("num_hidden_layers")?;
    if layers > MAX_LAYERS {
        return Err(fields.error("num_hidden_layers", format!("{layers} is not between 1 and {MAX_LAYERS}")));
    }
    let shared = ["architectures", "tie_word_embeddings", "dtype", "torch_dtype", "auto_map"];
    let mut map = fields.map.clone();
    map.retain(|key, _| {
        !shared.contains(&key.as_str()) && !foreign.contains(&key.as_str()) && !NOTES.contains(&key.as_str())
    });
    let slides = fields.texts("layer_types")?.is_some_and(|types| types.contains(&"sliding_attention"));
    let mut obstacles = vec![];
    if slides || fields.flag("use_sliding_window")?.unwrap_or(false) {
        obstacles.push(Obstacle {
            key: "layer_types".into(),
            reason: "draft layers with a sliding window: tools differ in who sees what within a block".into(),
        });
    }
    Ok(Decoder {
        family,
        hidden_size: fields.required_size("hidden_size")?,
        vocab_size: fields.required_size("vocab_size")?,
        layers,
        obstacles,
        map,
    })
}

/// The decoder of a flat config as other tools expect it.
fn flat(drafter: &Drafter) -> Map<String, Value> {
    let mut map = drafter.decoder.clone();
    let types = vec!["full_attention"; drafter.layers as usize];
    map.insert("layer_types".into(), types.into());
    map.insert("tie_word_embeddings".into(), false.into());
    if let Some(layers) = drafter.num_target_layers {
        map.insert("num_target_layers".into(), layers.into());
    }
    map.extend(drafter.notes.clone());
    map
}

/// Strictly increasing taps; `embedding` is what stands for the embedding's output.
fn taps(fields: &Fields, key: &str, embedding: i64) -> Result<Vec<Tap>, DialectError> {
    let ids = fields.required(key, fields.integers(key)?)?;
    // Past 32 bits no sum overflows, and no tap is found.
    let taps = Tap::from_layer_ids(ids.iter().map(|id| id.saturating_sub(embedding + 1)));
    taps.filter(|taps| !taps.is_empty() && taps.windows(2).all(|pair| pair[0] < pair[1])).ok_or_else(|| {
        let problem = format!("expected strictly increasing layer ids from {embedding}, found {ids:?}");
        fields.error(key, problem)
    })
}

/// The keys that only inform.
fn notes(fields: &Fields) -> Map<String, Value> {
    NOTES
        .iter()
        .filter_map(|&key| fields.map.get(key).map(|value| (key.to_string(), value.clone())))
        .collect()
}

/// The Markov head of `markov_rank` and `markov_head_type`.
fn markov(fields: &Fields) -> Result<Option<crate::Markov>, DialectError> {
    let rank = fields.count("markov_rank")?.unwrap_or(0);
    let name = fields.text("markov_head_type")?.unwrap_or("vanilla");
    if rank == 0 {
        return Ok(None);
    }
    let kind = crate::MarkovKind::parse(name).ok_or_else(|| {
        fields.error("markov_head_type", format!("\"{name}\" is unknown; expected vanilla, gated or rnn"))
    })?;
    Ok(Some(crate::Markov { kind, rank }))
}

/// The confidence head of `enable_confidence_head` and `confidence_head_with_markov`.
fn confidence(fields: &Fields, markov: Option<crate::Markov>) -> Result<Option<bool>, DialectError> {
    let with_markov = fields.flag("confidence_head_with_markov")?.unwrap_or(false);
    if !fields.flag("enable_confidence_head")?.unwrap_or(false) {
        return Ok(None);
    }
    if with_markov && markov.is_none() {
        let problem = "the confidence head wants the Markov embedding, but there is no Markov head";
        return Err(fields.error("confidence_head_with_markov", problem));
    }
    Ok(Some(with_markov))
}

/// More slots of a block are a mistake.
const MAX_BLOCK: u64 = 1024;

/// `block_size`, of which at least one slot drafts.
fn block_size(fields: &Fields, slots: Slots) -> Result<u64, DialectError> {
    let (key, least) = ("block_size", slots.first() as u64 + 1);
    match fields.required_size(key)? {
        size if (least..=MAX_BLOCK).contains(&size) => Ok(size),
        size => Err(fields.error(key, format!("{size} is not between {least} and {MAX_BLOCK}"))),
    }
}

/// `mask_token_id` within the vocabulary.
fn mask_token(fields: &Fields, vocab: u64) -> Result<u64, DialectError> {
    let key = "mask_token_id";
    let id = fields.required(key, fields.count(key)?)?;
    if id < vocab {
        return Ok(id);
    }
    Err(fields.error(key, format!("{id} is outside of the vocabulary of {vocab}")))
}
