//! A tap: a point of the target whose hidden states are captured for a drafter.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Name of the embedding output in configs and manifests.
const EMBEDDING: &str = "embedding";

/// A point of the target whose hidden states are captured: the embedding output, or the output of a
/// decoder layer.
///
/// Configs write it as `embedding` or as the 0-based layer id. They may also write −1 for the
/// embedding, like checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tap {
    /// The embedding output, before the first layer.
    Embedding,
    /// The raw output of this decoder layer (0-based), before the final norm.
    Layer(u32),
}

impl Tap {
    /// Layer id in checkpoints: −1 for the embedding, else the layer's index.
    pub fn layer_id(self) -> i64 {
        match self {
            Self::Embedding => -1,
            Self::Layer(layer) => i64::from(layer),
        }
    }

    /// Converts a checkpoint's layer ids; `None` if one is invalid.
    pub fn from_layer_ids(ids: impl IntoIterator<Item = i64>) -> Option<Vec<Self>> {
        ids.into_iter().map(Self::from_layer_id).collect()
    }

    /// Layer ids in checkpoints.
    pub fn layer_ids(taps: &[Self]) -> Vec<i64> {
        taps.iter().map(|tap| tap.layer_id()).collect()
    }

    /// Whether a target with `layers` layers has this state.
    pub fn is_within(self, layers: usize) -> bool {
        self.layer_id() < layers as i64
    }

    /// The tap `by` layers higher; None if there is no such layer.
    pub fn shifted_by(self, by: i64) -> Option<Self> {
        Self::from_layer_id(self.layer_id() + by)
    }

    /// Converts a checkpoint's layer id; `None` below −1 or past 32 bits.
    pub fn from_layer_id(id: i64) -> Option<Self> {
        match id {
            -1 => Some(Self::Embedding),
            id => u32::try_from(id).ok().map(Self::Layer),
        }
    }
}

impl fmt::Display for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedding => f.write_str(EMBEDDING),
            Self::Layer(layer) => layer.fmt(f),
        }
    }
}

impl JsonSchema for Tap {
    fn schema_name() -> Cow<'static, str> {
        "Tap".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"oneOf": [
            {"const": EMBEDDING, "description": "The embedding output, before the first layer; −1 means it too."},
            {"type": "integer", "minimum": -1, "description": "The raw output of this decoder layer, from 0, before the final norm."},
        ]})
    }
}

impl Serialize for Tap {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Embedding => serializer.serialize_str(EMBEDDING),
            Self::Layer(layer) => serializer.serialize_u32(*layer),
        }
    }
}

impl<'de> Deserialize<'de> for Tap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TapVisitor;

        impl Visitor<'_> for TapVisitor {
            type Value = Tap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a layer number or `embedding`")
            }

            fn visit_i64<E: Error>(self, id: i64) -> Result<Tap, E> {
                Tap::from_layer_id(id).ok_or_else(|| E::invalid_value(Unexpected::Signed(id), &self))
            }

            fn visit_u64<E: Error>(self, id: u64) -> Result<Tap, E> {
                u32::try_from(id)
                    .map(Tap::Layer)
                    .map_err(|_| E::invalid_value(Unexpected::Unsigned(id), &self))
            }

            fn visit_str<E: Error>(self, word: &str) -> Result<Tap, E> {
                match word {
                    EMBEDDING => Ok(Tap::Embedding),
                    other => Err(E::invalid_value(Unexpected::Str(other), &self)),
                }
            }
        }

        deserializer.deserialize_any(TapVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taps_read_as_words_and_numbers() {
        let taps: Vec<Tap> = serde_json::from_str(r#"["embedding", -1, 0, 33]"#).unwrap();
        assert_eq!(taps, [Tap::Embedding, Tap::Embedding, Tap::Layer(0), Tap::Layer(33)]);
        assert_eq!(serde_json::to_string(&taps).unwrap(), r#"["embedding","embedding",0,33]"#);
        assert_eq!(taps.iter().map(|tap| tap.layer_id()).collect::<Vec<_>>(), [-1, -1, 0, 33]);
        for bad in ["-2", "4294967296", "\"embeding\"", "1.5", "null"] {
            assert!(serde_json::from_str::<Tap>(bad).is_err(), "{bad}");
        }
    }
}
