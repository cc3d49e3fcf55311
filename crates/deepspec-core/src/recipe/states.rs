//! `data.states`: the source of the target's hidden states.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::json;

const SOURCE_NAMES: [&str; 3] = ["cache", "online", "hybrid"];

/// The source of target states. Written `{cache: DIR}`, `online` or `{hybrid: DIR}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum States {
    /// A folder built by `deepspec-data cache build`.
    Cache(String),
    /// The target itself, which runs beside the trainer; nothing is written.
    Online,
    /// The target in the first epoch, which writes this folder; the folder ever after.
    Hybrid(String),
}

impl States {
    /// The folder of the cache, if there is one.
    pub fn dir(&self) -> Option<&str> {
        match self {
            Self::Cache(dir) | Self::Hybrid(dir) => Some(dir),
            Self::Online => None,
        }
    }
}

impl Serialize for States {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Cache(dir) => serializer.collect_map([("cache", dir)]),
            Self::Online => serializer.serialize_str("online"),
            Self::Hybrid(dir) => serializer.collect_map([("hybrid", dir)]),
        }
    }
}

impl JsonSchema for States {
    fn schema_name() -> Cow<'static, str> {
        "States".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let folder = |name: &str, what: &str| {
            json!({
                "type": "object", "properties": {name: {"type": "string", "description": what}},
                "required": [name], "additionalProperties": false,
            })
        };
        json_schema!({"oneOf": [
            folder("cache", "A folder built by `deepspec-data cache build`."),
            {"const": "online", "description": "The target itself, which runs beside the trainer; nothing is written."},
            folder("hybrid", "The target in the first epoch, which writes this folder; the folder ever after."),
        ]})
    }
}

/// Manual implementation, because serde's error for `cache` without a folder does not mention the
/// folder.
impl<'de> Deserialize<'de> for States {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StatesVisitor;

        impl<'de> Visitor<'de> for StatesVisitor {
            type Value = States;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("{cache: DIR}, online or {hybrid: DIR}")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<States, E> {
                match name {
                    "online" => Ok(States::Online),
                    "cache" | "hybrid" => Err(E::custom(format!("{name} needs a folder: {{{name}: DIR}}"))),
                    other => Err(E::unknown_variant(other, &SOURCE_NAMES)),
                }
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<States, A::Error> {
                let Some(name) = map.next_key::<String>()? else {
                    return Err(A::Error::invalid_length(0, &self));
                };
                let states = match name.as_str() {
                    "cache" => States::Cache(map.next_value()?),
                    "hybrid" => States::Hybrid(map.next_value()?),
                    "online" => return Err(A::Error::custom("online takes no value: states: online")),
                    other => return Err(A::Error::unknown_variant(other, &SOURCE_NAMES)),
                };
                match map.next_key::<String>()? {
                    None => Ok(states),
                    Some(second) => Err(A::Error::custom(format!(
                        "there is one source of states, and both {name} and {second} are named"
                    ))),
                }
            }
        }

        deserializer.deserialize_any(StatesVisitor)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Data {
        states: States,
    }

    fn read(text: &str, overrides: &[&str]) -> Result<States, String> {
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        let data = config::parse::<Data>(Path::new("run.yaml"), text, &overrides);
        data.map(|data| data.states).map_err(|error| error.to_string())
    }

    #[test]
    fn every_source_survives_a_round_trip() {
        for (text, states) in [
            ("states: {cache: a}\n", States::Cache("a".into())),
            ("states:\n  hybrid: b\n", States::Hybrid("b".into())),
            ("states: online\n", States::Online),
        ] {
            assert_eq!(read(text, &[]).unwrap(), states);
            let saved = config::to_yaml(&Data { states: states.clone() }).unwrap();
            assert_eq!(read(&saved, &[]).unwrap(), states);
        }
        assert_eq!(read("states: {cache: a}\n", &["states=online"]).unwrap(), States::Online);
        assert_eq!(read("states: online\n", &["states={cache: a}"]).unwrap(), States::Cache("a".into()));
    }

    #[test]
    fn mistakes_are_named() {
        let wrong = |text: &str, hints: &[&str]| {
            let error = read(text, &[]).unwrap_err();
            assert!(hints.iter().all(|hint| error.contains(hint)), "{hints:?} in {error}");
        };
        wrong("states: cache\n", &["run.yaml:1: `states`", "{cache: DIR}"]);
        wrong("states: onlin\n", &["`states.onlin`", "did you mean `online`?"]);
        wrong("states: {cach: a}\n", &["did you mean `cache`?"]);
        wrong("states: {online: a}\n", &["takes no value"]);
        wrong("states: {cache: a, hybrid: b}\n", &["both cache and hybrid"]);
        wrong("states: {cache: [a]}\n", &["expected a text"]);
        wrong("states: {}\n", &["{cache: DIR}, online or {hybrid: DIR}"]);
        wrong("states: 3\n", &["{cache: DIR}, online or {hybrid: DIR}"]);
    }
}
