//! Registry entry of a kind of drafter: recipe section, parameter groups and checkpoints.

use std::path::Path;

use deepspec_checkpoint::{Engine, Reader};
use deepspec_core::config::{ConfigError, Document};
use deepspec_models::{ModelError, families};
use schemars::{Schema, SchemaGenerator};
use serde::de::DeserializeOwned;

use crate::{Drafter, DrafterOptions};

/// Returns the JSON schema of a kind's recipe section.
pub type SettingsSchema = fn(&mut SchemaGenerator) -> Schema;

/// Loads a drafter from a checkpoint folder.
type LoadFn = fn(&Path, &DrafterOptions) -> Result<Box<dyn Drafter>, ModelError>;

/// Registry entry of a kind of drafter.
pub struct DrafterKindInfo {
    /// Name of the kind in recipes, under `drafter`.
    pub name: &'static str,
    /// Name of the kind in messages.
    pub title: &'static str,
    /// Parameter groups that `train.freeze` can name.
    pub param_groups: &'static [ParamGroup],
    /// JSON schema of the recipe section; None for models that are not trained here.
    pub settings: Option<SettingsSchema>,
    /// Checkpoints of the kind; None if another kind's entry covers them.
    pub checkpoints: Option<CheckpointKind>,
}

/// Describes the checkpoints of a kind of drafter.
pub struct CheckpointKind {
    /// Class names in `architectures` of config.json.
    pub classes: fn() -> Vec<String>,
    /// Description of the contents, for messages.
    pub description: &'static str,
    /// Whether the checkpoints are causal language models with their own tokenizer.
    pub are_language_models: bool,
    /// See [`Proposer::tree_refusal`](deepspec_engine::Proposer::tree_refusal).
    pub tree_refusal: Option<&'static str>,
    /// Checks config.json as `load` does: keys, types and contradictions. Does not read weights.
    pub check: fn(&Path) -> Result<(), ModelError>,
    /// Loads a checkpoint.
    pub load: LoadFn,
    /// Reader of all layouts, for `checkpoint inspect` and `convert`; None if these commands do not support the kind.
    pub layouts: Option<&'static Reader>,
    /// Engines that load the checkpoints, of a kind without `layouts`.
    pub engines: &'static [Engine],
}

/// A group of parameters that can be frozen.
pub struct ParamGroup {
    /// Name in `train.freeze`.
    pub name: &'static str,
    /// Prefixes of the names of the parameters.
    pub prefixes: &'static [&'static str],
}

/// Section `drafter.<kind>` of a recipe.
pub struct RecipeSection<'a> {
    /// Recipe that contains the section.
    pub document: &'a Document,
    /// Name of the kind.
    pub kind: &'a str,
}

impl RecipeSection<'_> {
    /// Deserializes the section. An error names the wrong key, with file and line.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        self.document.read_section(&["drafter", self.kind])
    }

    /// An error about a key of the section; an empty key means the whole section.
    pub fn error(&self, key: &str, problem: impl Into<String>) -> ConfigError {
        let dot = if key.is_empty() { "" } else { "." };
        self.document.error(&format!("drafter.{}{dot}{key}", self.kind), problem)
    }
}

/// Class names of a drafter for each family of draft layers: the family's prefix and `behind_prefix`.
pub fn drafter_classes(behind_prefix: &str) -> Vec<String> {
    let families = families().filter(|family| family.has_drafters());
    families.map(|family| format!("{}{behind_prefix}", family.decoder.prefix)).collect()
}
