//! What several layouts have in common.

use deepspec_core::Tap;
use serde_json::{Map, Value};

use crate::drafter::{Drafter, Incompatibility, NOTES, Settings};
use crate::fields::Fields;
use crate::{CheckpointError, Family};

/// More draft layers are a mistake.
const MAX_LAYERS: u64 = 1024;

/// The parts of a decoder's config that all dialects share.
pub struct Decoder {
    /// Its layers' family.
    pub family: Family,
    /// The families that are known.
    pub families: Vec<Family>,
    /// Its own config keys.
    pub map: Map<String, Value>,
    /// d.
    pub hidden_size: u64,
    /// V, tokens of the target.
    pub vocab_size: u64,
    /// Draft layers.
    pub layers: u64,
    /// What of it other dialects cannot say.
    pub obstacles: Vec<Incompatibility>,
}

impl Decoder {
    /// Reads the decoder, of one of these families, from `fields`, leaving out the `foreign` keys, which only their dialect knows.
    ///
    /// # Errors
    /// If its family is unknown, or a key is missing or wrong.
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
        let layers = fields.required_size("num_hidden_layers")?;
        if layers > MAX_LAYERS {
            return Err(
                fields.error("num_hidden_layers", format!("{layers} is not between 1 and {MAX_LAYERS}"))
            );
        }
        let shared = ["architectures", "tie_word_embeddings", "dtype", "torch_dtype", "auto_map"];
        let mut map = fields.map.clone();
        map.retain(|key, _| {
            !shared.contains(&key.as_str())
                && !foreign.contains(&key.as_str())
                && !NOTES.contains(&key.as_str())
        });
        let slides = fields.texts("layer_types")?.is_some_and(|types| types.contains(&"sliding_attention"));
        let mut obstacles = vec![];
        if slides || fields.flag("use_sliding_window")?.unwrap_or(false) {
            obstacles.push(Incompatibility {
                key: "layer_types".into(),
                reason: "draft layers with a sliding window: tools differ in who sees what within a block"
                    .into(),
            });
        }
        if let Some(activation) = fields.text("hidden_act")?.filter(|&name| family.pre_norm && name != "silu")
        {
            let reason = format!("{activation}: draft layers of other tools have SiLU");
            obstacles.push(Incompatibility { key: "hidden_act".into(), reason });
        }
        Ok(Self {
            family,
            families: families.to_vec(),
            hidden_size: fields.required_size("hidden_size")?,
            vocab_size: fields.required_size("vocab_size")?,
            layers,
            obstacles,
            map,
        })
    }

    /// The drafter of these layers, its vocabulary whole; what else its config says at the usual places is read of `fields`.
    ///
    /// # Errors
    /// If a key has a wrong value.
    pub fn drafter(
        self,
        fields: &Fields,
        architecture: &str,
        taps: Vec<Tap>,
        kind: Settings,
    ) -> Result<Drafter, CheckpointError> {
        Ok(Drafter {
            architecture: architecture.into(),
            family: self.family,
            families: self.families,
            hidden_size: self.hidden_size,
            vocab_size: self.vocab_size,
            draft_vocab_size: self.vocab_size,
            layers: self.layers,
            taps,
            num_target_layers: fields.size("num_target_layers")?,
            kind,
            notes: notes(fields),
            obstacles: self.obstacles,
            decoder: self.map,
        })
    }
}

/// The decoder of a flat config as other tools expect it.
pub fn flat(drafter: &Drafter) -> Map<String, Value> {
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

/// Strictly increasing taps; `embedding` is the id that stands for the embedding's output.
///
/// # Errors
/// If `key` is missing or says something else.
pub fn taps(fields: &Fields, key: &str, embedding: i64) -> Result<Vec<Tap>, CheckpointError> {
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
