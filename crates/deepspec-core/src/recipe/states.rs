//! `data.states`: where the target's hidden states come from, and whether they are stored.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::json;

const KEYS: [&str; 6] = ["cache", "online", "hybrid", "server", "folder", "answers"];
const EXPECTED: &str = "{cache: DIR}, online, {hybrid: DIR} or {server: [URL, …]}";

/// Default folder in which vLLM servers and this machine exchange files of hidden states. It is in
/// memory.
pub const DEFAULT_STATES_FOLDER: &str = "/dev/shm/deepspec-states";

/// The hidden states of a run: their storage, and the servers that compute them. Written `{cache:
/// DIR}`, `online` or `{hybrid: DIR}`; `server: [URL, …]` takes them from vLLM. `{cache: DIR,
/// answers: FOLDER}` takes those that vLLM returned with the answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct States {
    /// Whether the states are stored, and where.
    pub storage: StatesStorage,
    /// The vLLM servers that compute the states; `None` if the target runs in this program.
    pub servers: Option<StateServers>,
    /// Folder of the states that `regenerate --with-states` stored, from which `cache build` takes
    /// them.
    pub answers: Option<String>,
}

/// Whether hidden states are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatesStorage {
    /// A folder built by `deepspec-data cache build`.
    Cache(String),
    /// Computed while the drafter trains; nothing is written.
    Online,
    /// Computed in the first epoch, which writes this folder; the folder ever after.
    Hybrid(String),
}

/// vLLM servers that return the hidden states of prompts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateServers {
    /// Base URLs, of servers or of the agents beside them.
    pub urls: Vec<String>,
    /// Folder of the servers' files, under the path that the servers have for it; `None` for
    /// [`DEFAULT_STATES_FOLDER`].
    pub folder: Option<String>,
}

impl StateServers {
    /// Folder of the servers' files.
    pub fn folder(&self) -> &str {
        self.folder.as_deref().unwrap_or(DEFAULT_STATES_FOLDER)
    }
}

impl States {
    /// States from a cache.
    pub fn cache(dir: impl Into<String>) -> Self {
        Self { storage: StatesStorage::Cache(dir.into()), servers: None, answers: None }
    }

    /// The folder of the cache, if there is one.
    pub fn dir(&self) -> Option<&str> {
        match &self.storage {
            StatesStorage::Cache(dir) | StatesStorage::Hybrid(dir) => Some(dir),
            StatesStorage::Online => None,
        }
    }

    /// Whether an engine computes the states, now or when it gave the answers.
    pub fn come_from_engine(&self) -> bool {
        self.servers.is_some() || self.answers.is_some()
    }

    /// Whether training runs the target within this program.
    pub fn runs_target(&self) -> bool {
        self.servers.is_none() && !matches!(self.storage, StatesStorage::Cache(_))
    }
}

impl Serialize for States {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.storage == StatesStorage::Online && self.servers.is_none() {
            return serializer.serialize_str("online");
        }
        let mut map = serializer.serialize_map(None)?;
        match &self.storage {
            StatesStorage::Cache(dir) => map.serialize_entry("cache", dir)?,
            StatesStorage::Hybrid(dir) => map.serialize_entry("hybrid", dir)?,
            StatesStorage::Online => {}
        }
        if let Some(StateServers { urls, folder }) = &self.servers {
            map.serialize_entry("server", urls)?;
            if let Some(folder) = folder {
                map.serialize_entry("folder", folder)?;
            }
        }
        if let Some(answers) = &self.answers {
            map.serialize_entry("answers", answers)?;
        }
        map.end()
    }
}

impl JsonSchema for States {
    fn schema_name() -> Cow<'static, str> {
        "States".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let server = json!({
            "description": "Base URLs of vLLM servers that compute the states (see \"Large and unusual targets\").",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
        });
        let folder = json!({
            "type": "string",
            "description": format!("Folder of the servers' files, under the path that the servers have for it; {DEFAULT_STATES_FOLDER} by default."),
        });
        let stored = |name: &str, what: &str| {
            json!({
                "type": "object",
                "properties": {name: {"type": "string", "description": what}, "server": server, "folder": folder},
                "required": [name], "additionalProperties": false,
            })
        };
        let answers = json!({
            "type": "string",
            "description": "Folder that `deepspec-data regenerate --with-states` filled; `cache build` takes the states from there.",
        });
        let mut cache = stored("cache", "A folder built by `deepspec-data cache build`.");
        cache["properties"]["answers"] = answers;
        json_schema!({"oneOf": [
            cache,
            {"const": "online", "description": "The target itself, which runs beside the trainer; nothing is written."},
            stored("hybrid", "The target in the first epoch, which writes this folder; the folder ever after."),
            {
                "type": "object", "properties": {"server": server, "folder": folder},
                "required": ["server"], "additionalProperties": false,
            },
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
                f.write_str(EXPECTED)
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<States, E> {
                match name {
                    "online" => Ok(States { storage: StatesStorage::Online, servers: None, answers: None }),
                    "cache" | "hybrid" => Err(E::custom(format!("{name} needs a folder: {{{name}: DIR}}"))),
                    "server" => Err(E::custom("server needs URLs: {server: [URL, …]}")),
                    other => Err(E::unknown_variant(other, &KEYS)),
                }
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<States, A::Error> {
                let (mut storage, mut urls, mut folder, mut answers) = (None, None, None, None);
                while let Some(name) = map.next_key::<String>()? {
                    match name.as_str() {
                        "cache" | "hybrid" => {
                            let dir = map.next_value()?;
                            let (other, found) = match name.as_str() {
                                "cache" => ("hybrid", StatesStorage::Cache(dir)),
                                _ => ("cache", StatesStorage::Hybrid(dir)),
                            };
                            if storage.replace(found).is_some() {
                                return Err(A::Error::custom(format!(
                                    "there is one storage of states, and both {other} and {name} are named"
                                )));
                            }
                        }
                        "server" => urls = Some(map.next_value::<OneOrMore>()?.into_checked()?),
                        "folder" => {
                            let found: String = map.next_value()?;
                            if !found.starts_with(['/', '~']) {
                                return Err(A::Error::custom(format!(
                                    "folder: {found}: expected an absolute path"
                                )));
                            }
                            folder = Some(found);
                        }
                        "answers" => answers = Some(map.next_value::<String>()?),
                        "online" => return Err(A::Error::custom("online takes no value: states: online")),
                        other => return Err(A::Error::unknown_variant(other, &KEYS)),
                    }
                }
                if answers.is_some() && (urls.is_some() || !matches!(storage, Some(StatesStorage::Cache(_))))
                {
                    return Err(A::Error::custom(
                        "answers is the folder from which `cache build` takes states, without servers: {cache: DIR, answers: FOLDER}",
                    ));
                }
                match (storage, urls, folder) {
                    (None, None, None) => Err(A::Error::invalid_length(0, &self)),
                    (_, None, Some(_)) => Err(A::Error::custom(
                        "folder is where servers leave their files; name them: server: [URL, …]",
                    )),
                    (storage, urls, folder) => Ok(States {
                        storage: storage.unwrap_or(StatesStorage::Online),
                        servers: urls.map(|urls| StateServers { urls, folder }),
                        answers,
                    }),
                }
            }
        }

        deserializer.deserialize_any(StatesVisitor)
    }
}

/// One URL or a list of them.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a URL or a list of URLs")]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

impl OneOrMore {
    fn into_checked<E: Error>(self) -> Result<Vec<String>, E> {
        let urls = match self {
            Self::One(url) => vec![url],
            Self::More(urls) => urls,
        };
        check_server_urls(urls).map_err(|problem| E::custom(format!("server: {problem}")))
    }
}

/// The base URLs of servers, without a trailing `/` or `/v1`.
///
/// # Errors
/// If there is none, one of them is no URL, or one is named twice.
pub fn check_server_urls(urls: Vec<String>) -> Result<Vec<String>, String> {
    if urls.is_empty() {
        return Err("expected at least one URL".into());
    }
    let mut checked: Vec<String> = Vec::with_capacity(urls.len());
    for url in urls {
        let host = url.strip_prefix("http://").or(url.strip_prefix("https://")).unwrap_or_default();
        if host.trim_matches('/').is_empty() {
            return Err(format!("{url}: expected a URL such as http://127.0.0.1:8000"));
        }
        let base = url.trim_end_matches('/').trim_end_matches("/v1").trim_end_matches('/').to_string();
        if checked.contains(&base) {
            return Err(format!("{url} is named twice"));
        }
        checked.push(base);
    }
    Ok(checked)
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

    fn stored(storage: StatesStorage, urls: &[&str], folder: Option<&str>) -> States {
        let urls: Vec<String> = urls.iter().map(ToString::to_string).collect();
        let servers = (!urls.is_empty()).then(|| StateServers { urls, folder: folder.map(Into::into) });
        States { storage, servers, answers: None }
    }

    #[test]
    fn every_source_survives_a_round_trip() {
        for (text, states) in [
            ("states: {cache: a}\n", States::cache("a")),
            ("states:\n  hybrid: b\n", stored(StatesStorage::Hybrid("b".into()), &[], None)),
            ("states: online\n", stored(StatesStorage::Online, &[], None)),
            ("states: {server: http://a:1/v1/}\n", stored(StatesStorage::Online, &["http://a:1"], None)),
            (
                "states: {server: [http://a:1, https://b], hybrid: c, folder: /f}\n",
                stored(StatesStorage::Hybrid("c".into()), &["http://a:1", "https://b"], Some("/f")),
            ),
            (
                "states: {cache: c, server: [http://a:1]}\n",
                stored(StatesStorage::Cache("c".into()), &["http://a:1"], None),
            ),
            ("states: {cache: c, answers: d}\n", States { answers: Some("d".into()), ..States::cache("c") }),
        ] {
            assert_eq!(read(text, &[]).unwrap(), states);
            let saved = config::to_yaml(&Data { states: states.clone() }).unwrap();
            assert_eq!(read(&saved, &[]).unwrap(), states);
        }
        assert_eq!(
            read("states: {cache: a}\n", &["states=online"]).unwrap(),
            stored(StatesStorage::Online, &[], None)
        );
        assert_eq!(read("states: online\n", &["states={cache: a}"]).unwrap(), States::cache("a"));
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
        wrong("states: {server: []}\n", &["at least one URL"]);
        wrong("states: {server: a:1}\n", &["a:1", "such as http://127.0.0.1:8000"]);
        wrong("states: {server: [http://a, http://a/v1]}\n", &["http://a/v1 is named twice"]);
        wrong("states: {server: 3}\n", &["a URL or a list of URLs"]);
        wrong("states: {cache: a, folder: /b}\n", &["server: [URL"]);
        wrong("states: {server: http://a, folder: b}\n", &["folder: b", "absolute path"]);
        wrong("states: {hybrid: a, answers: b}\n", &["{cache: DIR, answers: FOLDER}"]);
        wrong("states: {cache: a, answers: b, server: http://a}\n", &["without servers"]);
        wrong("states: server\n", &["{server: [URL"]);
        wrong("states: {}\n", &["{cache: DIR}, online, {hybrid: DIR} or {server"]);
        wrong("states: 3\n", &["{cache: DIR}, online, {hybrid: DIR} or {server"]);
    }
}
