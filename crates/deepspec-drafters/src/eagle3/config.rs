//! What an Eagle3 drafter is, read from and written to its checkpoint's config.json.

use std::path::Path;

use deepspec_models::config::{Fields, read_json};
use deepspec_models::{ModelConfig, ModelError};
use serde_json::{Map, Value, json};

use crate::trained::{self, DrafterConfig};

/// Classes of checkpoints are this behind the prefix of a family.
pub(super) const CLASS: &str = "Eagle3Model";

/// More steps are a mistake; refused here, they cannot exhaust the memory.
const MAX_STEPS: usize = 1024;

/// An Eagle3 drafter's architecture.
#[derive(Debug, Clone, PartialEq)]
pub struct Eagle3Config {
    /// The decoder's sizes; its layers are the draft layers.
    pub model: ModelConfig,
    /// Target layers it reads, strictly increasing; −1 is the embedding.
    pub target_layer_ids: Vec<i64>,
    /// Layers of the target.
    pub num_target_layers: usize,
    /// Steps it was trained for, and drafted tokens per block.
    pub ttt_length: usize,
    /// The loss of step s weighs this to the power of s; kept for information.
    pub step_loss_decay: f64,
}

impl DrafterConfig for Eagle3Config {
    fn load(dir: &Path) -> Result<Self, ModelError> {
        let (path, map) = read_json(dir)?;
        let model = ModelConfig::parse(&path, map.clone())?;
        let fields = Fields::new(&path, &map);
        let size = |key: &str| fields.size(key).and_then(|value| fields.required(key, value));
        let layers = model.layers.len();
        if let Some(found) = fields.size("draft_num_hidden_layers")?.filter(|&found| found != layers as i64) {
            let problem = format!("{found}, but num_hidden_layers is {layers}");
            return Err(fields.error("draft_num_hidden_layers", problem));
        }
        let config = Self {
            target_layer_ids: fields.required("target_layer_ids", fields.integers("target_layer_ids")?)?,
            num_target_layers: size("num_target_layers")? as usize,
            ttt_length: size("ttt_length")? as usize,
            step_loss_decay: fields.number("step_loss_decay")?.unwrap_or(0.8),
            model,
        };
        config.validate().map_err(|(key, problem)| fields.error(key, problem))?;
        Ok(config)
    }

    fn architecture(&self) -> String {
        format!("{}{CLASS}", self.model.family.prefix)
    }

    fn model(&self) -> &ModelConfig {
        &self.model
    }

    fn model_mut(&mut self) -> &mut ModelConfig {
        &mut self.model
    }

    fn taps(&self) -> &[i64] {
        &self.target_layer_ids
    }

    fn num_target_layers(&self) -> usize {
        self.num_target_layers
    }

    fn block_size(&self) -> usize {
        self.ttt_length
    }

    fn to_json(&self) -> Map<String, Value> {
        let (taps, target_layers) = (&self.target_layer_ids, self.num_target_layers);
        let mut map = trained::to_json(&self.model, &self.architecture(), taps, target_layers);
        map.insert("ttt_length".into(), json!(self.ttt_length));
        map.insert("step_loss_decay".into(), json!(self.step_loss_decay));
        map.insert("draft_num_hidden_layers".into(), json!(self.model.layers.len()));
        map
    }
}

impl Eagle3Config {
    /// Checks the fields against each other; the error is a key and what is wrong with it.
    ///
    /// # Errors
    /// If they contradict each other.
    pub fn validate(&self) -> Result<(), (&'static str, String)> {
        trained::check(&self.model, &self.target_layer_ids, self.num_target_layers)?;
        if self.model.layers.iter().any(|layer| layer.attention.window.is_some()) {
            return Err(("layer_types", "Eagle3 layers with a sliding window are not supported".into()));
        }
        if !(1..=MAX_STEPS).contains(&self.ttt_length) {
            return Err(("ttt_length", format!("{} is not between 1 and {MAX_STEPS}", self.ttt_length)));
        }
        Ok(())
    }
}
