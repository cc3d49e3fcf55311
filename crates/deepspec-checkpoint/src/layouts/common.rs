//! Functions that several formats share.

use deepspec_core::Tap;
use serde_json::{Map, Value};

use super::block_options::{SINK_KEYS, read_attention_sinks};
use super::windows;
use crate::drafter::{Drafter, INFORMATIVE_KEYS, Incompatibility, Settings};
use crate::fields::Fields;
use crate::shapes::{ADD_SWA_ATTENTION_SINK_BIAS, ATTENTION_SINK_BIAS};
use crate::{CheckpointError, Family};

/// Maximum number of draft layers.
const MAX_LAYERS: u64 = 1024;

/// The parts of a decoder's config that all formats share.
pub struct Decoder {
    /// Model family of the layers.
    pub family: Family,
    /// All known families.
    pub families: Vec<Family>,
    /// Config keys of the decoder, without those of the drafter.
    pub map: Map<String, Value>,
    /// Hidden size d.
    pub hidden_size: u64,
    /// Vocabulary size V of the target.
    pub vocab_size: u64,
    /// Number of draft layers.
    pub layers: u64,
    /// Settings of the checkpoint that other formats cannot express.
    pub incompatibilities: Vec<Incompatibility>,
}

impl Decoder {
    /// Reads a decoder of one of `families` from `fields`. Omits the `foreign` keys, which belong
    /// to the drafter and not to its decoder.
    ///
    /// # Errors
    /// Fails if the family is unknown, or if a key is missing or wrong.
    pub fn read(fields: &Fields, foreign: &[&str], families: &[Family]) -> Result<Self, CheckpointError> {
        let found = fields.text("model_type")?;
        let is_meant = |family: &&Family| found.is_some_and(|found| family.model_types.contains(&found));
        let Some(&family) = families.iter().find(is_meant) else {
            let names = families.iter().map(|family| family.name).collect::<Vec<_>>().join(", ");
            let found =
                found.map_or_else(|| "missing".into(), |found| format!("\"{found}\" is no known decoder"));
            let problem = format!("{found}; known are {names}");
            return Err(fields.error("model_type", problem));
        };
        let layers = read_layer_count(fields)?;
        let shared = ["architectures", "tie_word_embeddings", "dtype", "torch_dtype", "auto_map"];
        let mut map = fields.map.clone();
        map.retain(|key, _| {
            !shared.contains(&key.as_str())
                && !foreign.contains(&key.as_str())
                && !SINK_KEYS.contains(&key.as_str())
                && !INFORMATIVE_KEYS.contains(&key.as_str())
        });
        if read_attention_sinks(fields)? {
            map.insert(ATTENTION_SINK_BIAS.into(), true.into());
        }
        let slides = fields.texts("layer_types")?.is_some_and(|types| types.contains(&"sliding_attention"));
        let mut incompatibilities = vec![];
        if slides || fields.flag("use_sliding_window")?.unwrap_or(false) {
            incompatibilities.push(Incompatibility {
                key: "layer_types".into(),
                reason: "draft layers with a sliding window: tools differ in who sees what within a block"
                    .into(),
            });
        }
        if let Some(activation) = fields.text("hidden_act")?.filter(|&name| family.pre_norm && name != "silu")
        {
            let reason = format!("{activation}: draft layers of other tools have SiLU");
            incompatibilities.push(Incompatibility { key: "hidden_act".into(), reason });
        }
        Ok(Self {
            family,
            families: families.to_vec(),
            hidden_size: fields.required_size("hidden_size")?,
            vocab_size: fields.required_size("vocab_size")?,
            layers,
            incompatibilities,
            map,
        })
    }

    /// Accepts the windows that `use_sliding_window`, `sliding_window` and `layer_types` give to layers, for kinds that write them.
    pub fn accept_windows(&mut self) {
        if windows::has_windows(&self.map) {
            self.incompatibilities.retain(|found| found.key != "layer_types");
        }
    }

    /// Sets the number of draft layers, where the config counts those of the target.
    pub fn set_layers(&mut self, layers: u64) {
        self.layers = layers;
        self.map.insert("num_hidden_layers".into(), layers.into());
        self.map.remove("layer_types");
    }

    /// Builds the drafter of these layers. Reads the remaining common keys from `fields`.
    ///
    /// # Errors
    /// Fails if a key has a wrong value.
    pub fn into_drafter(
        mut self,
        fields: &Fields,
        architecture: &str,
        taps: Vec<Tap>,
        kind: Settings,
    ) -> Result<Drafter, CheckpointError> {
        let vocab = self.vocab_size;
        let reduced = read_draft_vocab_size(fields, vocab)?;
        if let Some(size) = reduced.filter(|_| !kind.may_reduce_vocab()) {
            let title = kind.title();
            let reason = format!(
                "the vocabulary is reduced to {size} of {vocab} tokens (d2t); {title} is read with the target's only"
            );
            self.incompatibilities.push(Incompatibility { key: DRAFT_VOCAB_SIZE.into(), reason });
        }
        Ok(Drafter {
            architecture: architecture.into(),
            family: self.family,
            families: self.families,
            hidden_size: self.hidden_size,
            vocab_size: self.vocab_size,
            draft_vocab_size: reduced.unwrap_or(vocab),
            layers: self.layers,
            taps,
            num_target_layers: fields.size("num_target_layers")?,
            kind,
            informative_keys: informative_keys(fields),
            incompatibilities: self.incompatibilities,
            decoder: self.map,
        })
    }
}

/// Reads the number of draft layers.
///
/// # Errors
/// Fails if `num_hidden_layers` is missing, wrong or too large.
pub fn read_layer_count(fields: &Fields) -> Result<u64, CheckpointError> {
    let layers = fields.required_size("num_hidden_layers")?;
    if layers > MAX_LAYERS {
        let problem = format!("{layers} is not between 1 and {MAX_LAYERS}");
        return Err(fields.error("num_hidden_layers", problem));
    }
    Ok(layers)
}

/// Key of the number of tokens that a drafter can draft.
const DRAFT_VOCAB_SIZE: &str = "draft_vocab_size";

/// Reads `draft_vocab_size` of a drafter for a target with `vocab_size` tokens. None if the key is absent, null or the
/// target's size.
///
/// # Errors
/// Fails if the value is no size, or above the target's.
pub fn read_draft_vocab_size(fields: &Fields, vocab_size: u64) -> Result<Option<u64>, CheckpointError> {
    if fields.map.get(DRAFT_VOCAB_SIZE).is_some_and(Value::is_null) {
        return Ok(None);
    }
    match fields.size::<u64>(DRAFT_VOCAB_SIZE)?.filter(|&size| size != vocab_size) {
        Some(size) if size > vocab_size => {
            Err(fields.error(DRAFT_VOCAB_SIZE, format!("{size} is above the vocabulary of {vocab_size}")))
        }
        size => Ok(size),
    }
}

/// The decoder's keys in a flat config as other tools expect it.
pub fn flat_config(drafter: &Drafter) -> Map<String, Value> {
    let mut map = drafter.decoder.clone();
    if !drafter.has_windows() {
        let types = vec!["full_attention"; drafter.layers as usize];
        map.insert("layer_types".into(), types.into());
    }
    map.insert("tie_word_embeddings".into(), false.into());
    if drafter.has_attention_sinks() {
        map.insert(ADD_SWA_ATTENTION_SINK_BIAS.into(), true.into());
    }
    if let Some(layers) = drafter.num_target_layers {
        map.insert("num_target_layers".into(), layers.into());
    }
    map.extend(drafter.informative_keys.clone());
    map
}

/// Id of the embedding's output in layouts whose id i is the output of layer i.
pub const EMBEDDING_LAYER_ID: i64 = -1;

/// Reads the captured layers at `key`, a strictly increasing list of ids. The id `embedding` stands
/// for the embedding's output.
///
/// # Errors
/// Fails if `key` is missing or has another value.
pub fn read_layer_ids(fields: &Fields, key: &str, embedding: i64) -> Result<Vec<Tap>, CheckpointError> {
    let ids = fields.required(key, fields.integers(key)?)?;
    // Saturation avoids overflow; ids past 32 bits match no layer.
    let taps = Tap::from_layer_ids(ids.iter().map(|id| id.saturating_sub(embedding + 1)));
    taps.filter(|taps| !taps.is_empty() && taps.windows(2).all(|pair| pair[0] < pair[1])).ok_or_else(|| {
        let problem = format!("expected strictly increasing layer ids from {embedding}, found {ids:?}");
        fields.error(key, problem)
    })
}

/// Reads the keys that do not affect the computation.
fn informative_keys(fields: &Fields) -> Map<String, Value> {
    INFORMATIVE_KEYS
        .iter()
        .filter_map(|&key| fields.map.get(key).map(|value| (key.to_string(), value.clone())))
        .collect()
}
