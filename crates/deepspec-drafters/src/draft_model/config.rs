//! Config keys of all trained drafters: a decoder like the target's, and the target layers that the drafter reads.

use std::path::Path;

use deepspec_checkpoint::Fields;
use deepspec_core::Tap;
use deepspec_core::cli::UsageError;
use deepspec_core::recipe::Recipe;
use deepspec_models::config::MAX_LAYERS;
use deepspec_models::{ModelConfig, ModelError, check_taps};
use serde_json::{Map, Value, json};

use crate::ConfigIssue;

/// A drafter's decoder, and the target layers that it reads.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftDecoder {
    /// The decoder's sizes; its layers are the draft layers.
    pub model: ModelConfig,
    /// Target layers that it reads, in order.
    pub taps: Vec<Tap>,
    /// Number of layers of the target.
    pub num_target_layers: usize,
}

impl DraftDecoder {
    /// The decoder of a block drafter; `windows` are the windows of its layers.
    ///
    /// # Errors
    /// A key of the recipe, and what is wrong with it.
    pub fn like_family<D>(
        target: &ModelConfig,
        recipe: &Recipe<D>,
        windows: impl Iterator<Item = Option<usize>>,
    ) -> Result<Self, ConfigIssue> {
        Self::of(target, recipe, target.anchored_decoder(&windows.take(MAX_LAYERS + 1).collect::<Vec<_>>()))
    }

    /// A decoder with so many layers like the target's.
    ///
    /// # Errors
    /// A key of the recipe, and what is wrong with it.
    pub fn like_target<D>(
        target: &ModelConfig,
        recipe: &Recipe<D>,
        layers: usize,
    ) -> Result<Self, ConfigIssue> {
        Self::of(target, recipe, target.draft_decoder(&vec![None; layers.min(MAX_LAYERS + 1)]))
    }

    fn of<D>(
        target: &ModelConfig,
        recipe: &Recipe<D>,
        model: Result<ModelConfig, ModelError>,
    ) -> Result<Self, ConfigIssue> {
        let model = model.map_err(|error| ("layer_types", error.to_string()))?;
        let taps = recipe.target.layer_ids.clone();
        Ok(Self { model, taps, num_target_layers: target.layers.len() })
    }

    /// Reads config.json of a checkpoint.
    ///
    /// # Errors
    /// If a key is missing or of a wrong type.
    pub fn read(path: &Path, map: &Map<String, Value>) -> Result<Self, ModelError> {
        let fields = Fields::new(path, map);
        let (key, layers) = ("target_layer_ids", "num_target_layers");
        let ids = fields.required(key, fields.integers(key)?)?;
        let taps = Tap::from_layer_ids(ids.iter().copied())
            .ok_or_else(|| fields.error(key, format!("{ids:?} are no layer ids; expected them from -1")))?;
        let num_target_layers = fields.required_size::<u64>(layers)? as usize;
        Ok(Self { model: ModelConfig::parse(path, map.clone())?, taps, num_target_layers })
    }

    /// Checks decoder and target layers.
    ///
    /// # Errors
    /// A key and what is wrong with it.
    pub fn check(&self) -> Result<(), ConfigIssue> {
        let layers = self.model.layers.len();
        if !(1..=MAX_LAYERS).contains(&layers) {
            return Err(("num_hidden_layers", format!("{layers} is not between 1 and {MAX_LAYERS}")));
        }
        if self.taps.is_empty() {
            return Err(("target_layer_ids", "at least one target layer is needed".into()));
        }
        check_taps(&self.taps, self.num_target_layers)
            .map_err(|error| ("target_layer_ids", error.to_string()))
    }

    /// Checks that the drafter fits a target of this architecture.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] naming what differs.
    pub fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError> {
        let Self { model, num_target_layers, .. } = self;
        let pairs = [
            ("vocab_size", model.vocab_size, target.vocab_size),
            ("hidden_size", model.hidden_size, target.hidden_size),
            ("number of target layers", *num_target_layers as i64, target.layers.len() as i64),
        ];
        let mut differences: Vec<String> = pairs
            .iter()
            .filter(|(_, drafter, target)| drafter != target)
            .map(|(what, drafter, target)| format!("{what} {target}, the drafter was trained for {drafter}"))
            .collect();
        // The target knows the families whose drafters it can have.
        if !target.has_drafters_of(model.family) {
            let (target, drafter) = (target.family, model.family);
            differences.push(format!("the architecture of {target}, the drafter was trained for {drafter}"));
        }
        if differences.is_empty() {
            let (own, theirs) = (model.max_position_embeddings, target.max_position_embeddings);
            if own < theirs {
                tracing::warn!(
                    "the drafter was made for {own} positions, the target for {theirs}; behind position {own} drafts may be accepted less"
                );
            }
            return Ok(());
        }
        Err(ModelError::Mismatch(UsageError(format!(
            "the drafter does not belong to this target: the target has {}",
            differences.join("; ")
        ))))
    }

    /// config.json of the decoder, with the keys that every drafter adds.
    pub fn to_json(&self, architecture: &str) -> Map<String, Value> {
        let mut map = self.model.raw.clone();
        map.insert("architectures".into(), json!([architecture]));
        map.insert("num_target_layers".into(), json!(self.num_target_layers));
        map.insert("target_layer_ids".into(), json!(Tap::layer_ids(&self.taps)));
        map.insert("tie_word_embeddings".into(), json!(false));
        map.insert("dtype".into(), json!("bfloat16"));
        map.remove("torch_dtype");
        map
    }
}
