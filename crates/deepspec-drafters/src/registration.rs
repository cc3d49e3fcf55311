//! Entries of the registry: the settings and checkpoints of each kind of drafter.

use std::path::Path;

use deepspec_checkpoint::Reader;
use deepspec_core::config::{ConfigError, Document};
use deepspec_models::{ModelError, families};
use schemars::{Schema, SchemaGenerator};
use serde::de::DeserializeOwned;

use crate::{Drafter, DrafterOptions};

/// Describes the settings of a kind.
pub type SettingsSchema = fn(&mut SchemaGenerator) -> Schema;

/// Loads a checkpoint of a kind.
type Load = fn(&Path, &DrafterOptions) -> Result<Box<dyn Drafter>, ModelError>;

/// A kind of drafter, as its folder announces it.
pub struct DrafterKindInfo {
    /// Names it in recipes, under `drafter`.
    pub name: &'static str,
    /// Names it to people.
    pub title: &'static str,
    /// Its parts, for those that are to stay as they are while others learn.
    pub parts: &'static [ParamGroup],
    /// Describes its settings in a recipe, for editors and the manual; None for models that are not trained here.
    pub settings: Option<SettingsSchema>,
    /// Its checkpoints; None where they are those of another kind.
    pub checkpoints: Option<Checkpoints>,
}

/// Checkpoints of a kind.
pub struct Checkpoints {
    /// Their classes, as `architectures` in config.json names them.
    pub classes: fn() -> Vec<String>,
    /// Description of their contents, for messages.
    pub hold: &'static str,
    /// Whether they are language models in their own right, whose ids mean what their own tokenizer says.
    pub are_language_models: bool,
    /// Checks what a config.json says as loading does, without the weights.
    pub check: fn(&Path) -> Result<(), ModelError>,
    /// Loads one.
    pub load: Load,
    /// How their settings are read, in the reference's layout and those of other tools; None for what `checkpoint inspect` and
    /// `convert` do not know.
    pub layouts: Option<&'static Reader>,
}

/// A part of a drafter.
pub struct ParamGroup {
    /// Names it in `train.freeze`.
    pub name: &'static str,
    /// Beginnings of the names of its parameters.
    pub prefixes: &'static [&'static str],
}

/// The settings of a kind where they stand in a recipe.
pub struct Section<'a> {
    /// The recipe.
    pub document: &'a Document,
    /// The kind's name.
    pub kind: &'a str,
}

impl Section<'_> {
    /// Reads them.
    ///
    /// # Errors
    /// A key that is unknown, missing or has a wrong value, with file and line.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        self.document.read_section(&["drafter", self.kind])
    }

    /// An error about one of their keys; an empty key is all of them.
    pub fn error(&self, key: &str, problem: impl Into<String>) -> ConfigError {
        let dot = if key.is_empty() { "" } else { "." };
        self.document.error(&format!("drafter.{}{dot}{key}", self.kind), problem)
    }
}

/// Classes of drafters with layers like those of any known family.
pub fn classes(behind_prefix: &str) -> Vec<String> {
    families().map(|family| format!("{}{behind_prefix}", family.decoder.prefix)).collect()
}
