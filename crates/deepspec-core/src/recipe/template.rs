//! `data.chat_template`: the name of built-in mask rules, or custom rules.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::config::{self, ConfigError};
use crate::env;

/// Name of the mask rules that follow the chat template's own `{% generation %}` tags.
pub const GENERATION_RULES: &str = "generation";

/// Key prefix of an entry in a recipe.
const KEY_PREFIX: &str = "data.chat_template.";

/// How the assistant's words are found in a rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateRecipe {
    /// The name of built-in rules. Only before [`TemplateRecipe::resolve`] it may also be the path of a YAML file.
    Name(String),
    /// Rules of one's own.
    Entry(TemplateEntry),
}

/// Mask rules of a chat format that is not built in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TemplateEntry {
    /// Name of the rules in messages and caches.
    pub name: String,
    /// The text right before the assistant's words.
    pub assistant_header: String,
    /// The text that ends a turn; it is supervised too.
    pub end_of_turn: String,
    /// The system message of conversations that have none; absent means no message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_system: Option<String>,
    /// Put before the assistant's words, and not supervised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assistant_prefix: Option<String>,
}

impl TemplateRecipe {
    /// Replaces the path of a `.yaml` or `.yml` file by its content. A saved config thus contains
    /// the rules instead of a path.
    ///
    /// # Errors
    /// See [`TemplateEntry::load`].
    pub fn resolve(self) -> Result<Self, ConfigError> {
        match self {
            Self::Name(name) if is_yaml_path(&name) => {
                TemplateEntry::load(&env::expand_home(&name)).map(Self::Entry)
            }
            other => Ok(other),
        }
    }
}

impl TemplateEntry {
    /// Reads an entry from its own YAML file.
    ///
    /// # Errors
    /// Fails if the file cannot be read, has an unknown key, lacks a key, or has an empty marker.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let entry: Self = config::load(path, &[])?;
        entry.check().map_err(|(key, problem)| ConfigError::Key {
            path: path.to_path_buf(),
            line: None,
            key: key.trim_start_matches(KEY_PREFIX).into(),
            problem,
        })?;
        Ok(entry)
    }

    /// Makes the checks that types cannot express; the error is the recipe's key with its problem.
    pub(super) fn check(&self) -> Result<(), (&'static str, String)> {
        let prefix = self.assistant_prefix.as_deref();
        let marks = [
            (
                "data.chat_template.name",
                Some(self.name.as_str()),
                "it names the rules in caches and messages",
            ),
            (
                "data.chat_template.assistant_header",
                Some(self.assistant_header.as_str()),
                "it would match everywhere",
            ),
            (
                "data.chat_template.end_of_turn",
                Some(self.end_of_turn.as_str()),
                "every answer would end at once",
            ),
            ("data.chat_template.assistant_prefix", prefix, "leave it out for no prefix"),
        ];
        if let Some((key, _, why)) = marks.iter().find(|(_, mark, _)| *mark == Some("")) {
            return Err((key, format!("must not be empty: {why}")));
        }
        if self.name == GENERATION_RULES || is_yaml_path(&self.name) {
            let problem = format!(
                "`{}` is taken: it stands for the template's own tags or for a file; choose another name",
                self.name
            );
            return Err(("data.chat_template.name", problem));
        }
        Ok(())
    }
}

fn is_yaml_path(name: &str) -> bool {
    name.ends_with(".yaml") || name.ends_with(".yml")
}

impl Serialize for TemplateRecipe {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Name(name) => serializer.serialize_str(name),
            Self::Entry(entry) => entry.serialize(serializer),
        }
    }
}

impl JsonSchema for TemplateRecipe {
    fn schema_name() -> Cow<'static, str> {
        "TemplateRecipe".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({"oneOf": [
            {"type": "string", "description": "The name of built-in rules, or the path of a YAML file with an entry."},
            generator.subschema_for::<TemplateEntry>(),
        ]})
    }
}

/// Manual implementation, because the error of an untagged enum names neither key nor line.
impl<'de> Deserialize<'de> for TemplateRecipe {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameOrEntry;

        impl<'de> Visitor<'de> for NameOrEntry {
            type Value = TemplateRecipe;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "a name, a .yaml file, or an entry with `name`, `assistant_header` and `end_of_turn`",
                )
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<TemplateRecipe, E> {
                Ok(TemplateRecipe::Name(name.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<TemplateRecipe, A::Error> {
                TemplateEntry::deserialize(MapAccessDeserializer::new(map)).map(TemplateRecipe::Entry)
            }
        }

        deserializer.deserialize_any(NameOrEntry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Data {
        chat_template: TemplateRecipe,
    }

    fn read(text: &str) -> Result<TemplateRecipe, String> {
        let parsed = config::parse::<Data>(Path::new("run.yaml"), text, &[]);
        parsed.map(|data| data.chat_template).map_err(|error| error.to_string())
    }

    fn entry() -> TemplateEntry {
        TemplateEntry {
            name: "mine".into(),
            assistant_header: "<|assistant|>\n".into(),
            end_of_turn: "<|end|>\n".into(),
            default_system: None,
            assistant_prefix: Some("<think></think>".into()),
        }
    }

    const ENTRY: &str = "name: mine\nassistant_header: \"<|assistant|>\\n\"\nend_of_turn: \"<|end|>\\n\"\nassistant_prefix: <think></think>\n";

    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mine.yaml");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    #[test]
    fn names_and_entries_keep_their_form() {
        for (text, expected) in [
            ("chat_template: qwen\n".to_owned(), TemplateRecipe::Name("qwen".into())),
            (
                format!("chat_template:\n  {}\n", ENTRY.trim_end().replace('\n', "\n  ")),
                TemplateRecipe::Entry(entry()),
            ),
        ] {
            let data: Data = config::parse(Path::new("run.yaml"), &text, &[]).unwrap();
            assert_eq!(data.chat_template, expected);
            let saved = config::to_yaml(&data).unwrap();
            assert_eq!(config::parse::<Data>(Path::new("run.yaml"), &saved, &[]).unwrap(), data);
        }
    }

    #[test]
    fn a_run_that_goes_on_with_other_rules_is_told() {
        let json = |template: TemplateRecipe| serde_json::to_value(Data { chat_template: template }).unwrap();
        let named = json(TemplateRecipe::Name("qwen".into()));
        let (mine, other) = (entry(), TemplateEntry { end_of_turn: "<|stop|>".into(), ..entry() });
        let (mine, other) = (json(TemplateRecipe::Entry(mine)), json(TemplateRecipe::Entry(other)));
        assert_eq!(config::differences(&mine, &mine), [""; 0]);
        assert_eq!(
            config::differences(&mine, &other),
            [r#"chat_template.end_of_turn (was "<|end|>\n", is "<|stop|>")"#]
        );
        assert!(config::differences(&named, &mine)[0].starts_with("chat_template (was \"qwen\", is {"));
    }

    #[test]
    fn a_file_becomes_its_entry() {
        let (_dir, path) = file(ENTRY);
        let named = TemplateRecipe::Name(path.to_string_lossy().into_owned());
        assert_eq!(named.resolve().unwrap(), TemplateRecipe::Entry(entry()));
        let builtin = TemplateRecipe::Name("qwen".into());
        assert_eq!(builtin.clone().resolve().unwrap(), builtin);
        let absent = TemplateRecipe::Name("/nowhere/mine.yml".into()).resolve().unwrap_err().to_string();
        assert!(absent.contains("/nowhere/mine.yml"), "{absent}");
    }

    #[test]
    fn mistakes_name_key_line_and_nearest_name() {
        let error = read("chat_template:\n  name: a\n  assistant_heder: b\n").unwrap_err();
        assert!(error.starts_with("run.yaml:3: `chat_template.assistant_heder`"), "{error}");
        assert!(error.contains("did you mean `assistant_header`?"), "{error}");
        let missing = read("chat_template: {name: a, assistant_header: b}\n").unwrap_err();
        assert!(missing.contains("`chat_template`") && missing.contains("end_of_turn"), "{missing}");
        let kind = read("chat_template: 3\n").unwrap_err();
        assert!(kind.contains("a .yaml file, or an entry"), "{kind}");
        let (_dir, path) = file("nam: a\n");
        let inside = TemplateEntry::load(&path).unwrap_err().to_string();
        assert!(inside.contains("mine.yaml:1") && inside.contains("did you mean `name`?"), "{inside}");
    }

    #[test]
    fn empty_marks_and_taken_names_are_refused_by_key() {
        let refused = |change: fn(&mut TemplateEntry), key: &str| {
            let mut changed = entry();
            change(&mut changed);
            assert_eq!(changed.check().unwrap_err().0, format!("{KEY_PREFIX}{key}"));
        };
        refused(|entry| entry.name.clear(), "name");
        refused(|entry| entry.name = GENERATION_RULES.into(), "name");
        refused(|entry| entry.name = "a.yml".into(), "name");
        refused(|entry| entry.assistant_header.clear(), "assistant_header");
        refused(|entry| entry.end_of_turn.clear(), "end_of_turn");
        refused(|entry| entry.assistant_prefix = Some(String::new()), "assistant_prefix");
        assert_eq!(entry().check(), Ok(()));
        let (_dir, path) = file(&ENTRY.replace("<|end|>\\n", ""));
        let inside = TemplateEntry::load(&path).unwrap_err().to_string();
        assert!(inside.contains("mine.yaml: `end_of_turn`: must not be empty"), "{inside}");
    }
}
