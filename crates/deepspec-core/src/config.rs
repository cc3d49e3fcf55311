//! YAML configuration: typed, with dotted overrides. Errors name the key, the line and the nearest
//! known name.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_yaml::{Mapping, Value};

use crate::atomic::{self, FileError};

/// A config that cannot be used. Exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not YAML.
    #[error("{}: not valid YAML: {problem}", path.display())]
    Syntax {
        /// The config file.
        path: PathBuf,
        /// The parser's message, with line and column.
        problem: String,
    },
    /// A key is unknown, missing or has a wrong value.
    #[error("{}{}: `{key}`: {problem}", path.display(), line.map(|l| format!(":{l}")).unwrap_or_default())]
    Key {
        /// The config file.
        path: PathBuf,
        /// 1-based line of the key, if it is in the file.
        line: Option<usize>,
        /// Dotted path of the key.
        key: String,
        /// The problem and the expected value.
        problem: String,
    },
    /// `--set` has not the form key=value, or a parent key is no mapping.
    #[error("--set {text}: {problem}")]
    Override {
        /// The argument as given.
        text: String,
        /// The problem.
        problem: String,
    },
}

/// Reads `path` as `T` after applying `key.path=value` overrides; values are parsed as YAML.
///
/// # Errors
/// See [`ConfigError`].
pub fn load<T: DeserializeOwned>(path: &Path, overrides: &[String]) -> Result<T, ConfigError> {
    let text = atomic::read_text(path)?;
    parse(path, &text, overrides)
}

/// Like [`load`], for text that was read already; `path` only labels errors.
///
/// # Errors
/// See [`ConfigError`].
pub fn parse<T: DeserializeOwned>(path: &Path, text: &str, overrides: &[String]) -> Result<T, ConfigError> {
    Document::parse(path, text, overrides)?.read()
}

/// A parsed config whose sections different modules read into their own types.
#[derive(Debug, Clone)]
pub struct Document {
    path: PathBuf,
    text: String,
    value: serde_json::Value,
    /// Keys that overrides set, and whether the file also has them. A key from an override has no
    /// line number.
    set: Vec<(String, bool)>,
}

impl Document {
    /// Reads a file and applies `key.path=value` overrides; values are parsed as YAML.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self, ConfigError> {
        Self::parse(path, &atomic::read_text(path)?, overrides)
    }

    /// Like [`Document::load`], for text that was read already; `path` only labels errors.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn parse(path: &Path, text: &str, overrides: &[String]) -> Result<Self, ConfigError> {
        let syntax = |problem: String| ConfigError::Syntax { path: path.to_path_buf(), problem };
        // Editors on Windows write a byte order mark.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut value: Value = serde_yaml::from_str(text).map_err(|error| syntax(error.to_string()))?;
        let keys = overrides.iter().filter_map(|item| Some(item.split_once('=')?.0.to_string()));
        let is_there = |key: &str| key.split('.').try_fold(&value, |within, key| within.get(key)).is_some();
        let set_keys = keys.map(|key| (key.clone(), is_there(&key))).collect();
        for item in overrides {
            apply_override(&mut value, item)?;
        }
        if let Some(key) = find_non_finite_key(&value, String::new()) {
            let is_set = overrides.iter().any(|item| item.split_once('=').is_some_and(|(set, _)| set == key));
            let (path, line) = match is_set {
                true => (PathBuf::from("--set"), None),
                false => (path.to_path_buf(), find_line_of_key(text, &key)),
            };
            return Err(ConfigError::Key { path, line, key, problem: "a number must be finite".into() });
        }
        // Converts to JSON's data model, where an enum is a map with one key rather than a YAML
        // tag.
        let value = serde_json::to_value(value).map_err(|error| syntax(error.to_string()))?;
        Ok(Self { path: path.to_path_buf(), text: text.into(), value, set: set_keys })
    }

    /// A document of a parsed value; `path` labels errors.
    pub fn from_value(path: &Path, value: serde_json::Value) -> Self {
        Self { path: path.to_path_buf(), text: String::new(), value, set: vec![] }
    }

    /// Reads the whole document.
    ///
    /// # Errors
    /// Returns [`ConfigError::Key`] for a key that is unknown, missing or has a wrong value.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        self.read_section(&[])
    }

    /// Reads the section at this path of keys.
    ///
    /// # Errors
    /// Fails as [`Document::read`] does.
    pub fn read_section<T: DeserializeOwned>(&self, keys: &[&str]) -> Result<T, ConfigError> {
        let section = keys.iter().try_fold(&self.value, |value, key| value.get(key));
        let value = section.cloned().unwrap_or(serde_json::Value::Null);
        serde_path_to_error::deserialize(value).map_err(|error| {
            let mut path = keys.join(".");
            let within = error.path().to_string();
            if within != "." {
                path = if path.is_empty() { within } else { format!("{path}.{within}") };
            }
            let problem = describe_serde_error(&error.inner().to_string());
            let unknown = text_between(&problem, "unknown field `", "`")
                .or_else(|| text_between(&problem, "unknown variant `", "`"));
            match unknown {
                Some(unknown) if path.is_empty() => self.error(unknown, add_nearest_name(unknown, &problem)),
                Some(unknown) if !path.ends_with(unknown) => {
                    self.error(&format!("{path}.{unknown}"), add_nearest_name(unknown, &problem))
                }
                Some(unknown) => self.error(&path, add_nearest_name(unknown, &problem)),
                None => self.error(if path.is_empty() { "." } else { &path }, problem),
            }
        })
    }

    /// An error about a dotted key, with its line if it is in the file.
    pub fn error(&self, key: &str, problem: impl Into<String>) -> ConfigError {
        let is_within = |inner: &str, outer: &str| {
            inner == outer || inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with(['.', '[']))
        };
        // The error is attributed to `--set` for a set key and keys inside it. A section counts too
        // if the file lacks the set key in it. A missing field is always attributed to the file.
        let problem: String = problem.into();
        let is_missing = problem.starts_with("missing field");
        let is_set = self
            .set
            .iter()
            .any(|(set, is_there)| is_within(key, set) || (is_within(set, key) && !is_there && !is_missing));
        let line = if is_set { None } else { find_line_of_key(&self.text, key) };
        let path = if is_set { PathBuf::from("--set") } else { self.path.clone() };
        ConfigError::Key { path, line, key: key.into(), problem }
    }
}

/// Adds the nearest known name to the problem, if a known name is similar. `problem` lists the
/// known names in backticks after "expected".
pub fn add_nearest_name(unknown: &str, problem: &str) -> String {
    match nearest_known_name(unknown, problem) {
        Some(near) => format!("{problem}; did you mean `{near}`?"),
        None => problem.into(),
    }
}

/// Writes a config in the format that [`load`] reads.
///
/// # Errors
/// Fails if a value cannot be written as YAML.
pub fn to_yaml(config: &impl Serialize) -> Result<String, String> {
    let value = serde_json::to_value(config).map_err(|error| error.to_string())?;
    serde_yaml::to_string(&value).map_err(|error| error.to_string())
}

/// Lists the dotted keys in which two configs differ, such as `train.lr (was 0.1, is 0.2)`.
pub fn differences(was: &serde_json::Value, is: &serde_json::Value) -> Vec<String> {
    labelled_differences(("was", was), ("is", is))
}

/// Lists the dotted keys in which two configs differ, such as `train.lr (file 0.1, run 0.2)`. Each
/// argument is a label with its config.
pub fn labelled_differences(
    one: (&str, &serde_json::Value),
    other: (&str, &serde_json::Value),
) -> Vec<String> {
    use serde_json::Value::{Null, Object};
    type Pair<'a> = [&'a serde_json::Value; 2];
    fn walk(path: &str, [a, b]: Pair<'_>, words: [&str; 2], found: &mut Vec<String>) {
        if let (Object(a), Object(b)) = (a, b) {
            let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for key in keys {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                walk(&path, [a.get(key).unwrap_or(&Null), b.get(key).unwrap_or(&Null)], words, found);
            }
        } else if a != b {
            found.push(format!("{path} ({} {a}, {} {b})", words[0], words[1]));
        }
    }
    let mut found = vec![];
    walk("", [one.1, other.1], [one.0, other.0], &mut found);
    found
}

fn apply_override(root: &mut Value, item: &str) -> Result<(), ConfigError> {
    let bad = |problem: &str| ConfigError::Override { text: item.into(), problem: problem.into() };
    let (path, value) = item.split_once('=').ok_or_else(|| bad("expected key=value"))?;
    let value: Value =
        serde_yaml::from_str(value).map_err(|error| bad(&format!("the value is not YAML: {error}")))?;
    let mut place = root;
    for key in path.split('.') {
        if key.is_empty() {
            return Err(bad("a key is empty"));
        }
        if place.is_null() {
            *place = Value::Mapping(Mapping::new());
        }
        let mapping = place
            .as_mapping_mut()
            .ok_or_else(|| bad(&format!("`{key}` lies inside a value that is not a mapping")))?;
        place = mapping.entry(Value::from(key)).or_insert(Value::Null);
    }
    *place = value;
    Ok(())
}

/// The dotted key of an infinite or NaN number, which JSON cannot represent.
fn find_non_finite_key(value: &Value, path: String) -> Option<String> {
    match value {
        Value::Number(number) => number.as_f64().is_some_and(|number| !number.is_finite()).then_some(path),
        Value::Mapping(mapping) => mapping.iter().find_map(|(key, value)| {
            let key = key.as_str().unwrap_or_default();
            find_non_finite_key(value, if path.is_empty() { key.into() } else { format!("{path}.{key}") })
        }),
        Value::Sequence(list) => {
            list.iter().enumerate().find_map(|(i, value)| find_non_finite_key(value, format!("{path}[{i}]")))
        }
        _ => None,
    }
}

/// Replaces Rust type names in a serde error message by plain words, such as `usize` by "a whole
/// number from 0".
pub fn describe_serde_error(problem: &str) -> String {
    let (head, expected) = match problem.rsplit_once("expected ") {
        Some((head, expected)) => (head, expected),
        None => return problem.into(),
    };
    let expected = match expected {
        "usize" | "u64" | "u32" | "u16" | "u8" => "a whole number from 0",
        "isize" | "i64" | "i32" => "a whole number",
        "f64" | "f32" => "a number",
        "a string" | "string" => "a text",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        other if other.starts_with("struct ") || other.starts_with("a map") => "a mapping of keys to values",
        other if other.starts_with("internally tagged enum") => "a mapping of keys to values",
        other => other,
    };
    format!("{head}expected {expected}").replace("null", "nothing")
}

fn text_between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    let rest = &text[text.find(start)? + start.len()..];
    Some(&rest[..rest.find(end)?])
}

/// The most similar known name to `unknown`, among the quoted names after "expected" in serde's
/// message.
fn nearest_known_name(unknown: &str, message: &str) -> Option<String> {
    let known = &message[message.find("expected")?..];
    known
        .split('`')
        .skip(1)
        .step_by(2)
        .map(|name| (strsim::levenshtein(unknown, name), name))
        .min()
        .filter(|&(distance, name)| distance * 2 <= name.len().max(2))
        .map(|(_, name)| name.to_string())
}

/// The line where the keys of a dotted path appear in order, in block or flow style.
fn find_line_of_key(text: &str, path: &str) -> Option<usize> {
    let (mut offset, mut found) = (0, None);
    for key in path.split('.') {
        let key = key.split('[').next().unwrap_or_default();
        let position = text[offset..].match_indices(key).find(|(at, _)| {
            let (before, after) = (&text[..offset + at], &text[offset + at + key.len()..]);
            let starts = before.chars().next_back().is_none_or(|c| !c.is_alphanumeric() && c != '_');
            starts && after.trim_start_matches(['"', '\'', ' ']).starts_with(':')
        });
        if let Some((at, _)) = position {
            offset += at + key.len();
            found = Some(text[..offset].matches('\n').count() + 1);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Train {
        lr: f64,
        local_batch_size: Option<usize>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Run {
        name: String,
        train: Train,
    }

    fn read(text: &str, overrides: &[&str]) -> Result<Run, String> {
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        parse(Path::new("run.yaml"), text, &overrides).map_err(|error| error.to_string())
    }

    const GOOD: &str = "name: a\ntrain:\n  lr: 1.0e-3\n";

    #[test]
    fn overrides_reach_nested_and_absent_keys() {
        let run = read(GOOD, &["train.lr=3e-4", "train.local_batch_size=4", "name=b"]).unwrap();
        assert_eq!((run.name.as_str(), run.train.lr, run.train.local_batch_size), ("b", 3e-4, Some(4)));
    }

    #[test]
    fn an_unknown_key_names_its_line_and_the_nearest_name() {
        let error = read("name: a\ntrain:\n  lr: 1\n  local_bach_size: 2\n", &[]).unwrap_err();
        assert!(error.starts_with("run.yaml:4: `train.local_bach_size`"), "{error}");
        assert!(error.contains("did you mean `local_batch_size`?"), "{error}");
        let flow = read("name: a\ntrain: {lr: 1, local_bach_size: 2}\n", &[]).unwrap_err();
        assert!(flow.starts_with("run.yaml:2: "), "{flow}");
    }

    #[test]
    fn a_wrong_value_names_its_key() {
        let error = read("name: a\ntrain: {lr: fast}\n", &[]).unwrap_err();
        assert!(error.contains("`train.lr`") && error.contains("fast"), "{error}");
        assert!(read(GOOD, &["train"]).unwrap_err().contains("key=value"));
        assert!(read(GOOD, &["name.first=x"]).unwrap_err().contains("not a mapping"));
        assert!(read("a: [", &[]).unwrap_err().contains("not valid YAML"));
    }
}
