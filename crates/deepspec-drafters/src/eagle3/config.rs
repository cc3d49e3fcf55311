//! What an Eagle3 drafter is, read from and written to its checkpoint's config.json.

use std::path::Path;

use deepspec_checkpoint::Fields;
use deepspec_models::ModelError;
use deepspec_models::config::read_json;
use serde_json::{Map, Value, json};

use crate::ConfigIssue;
use crate::draft_model::{DraftDecoder, DrafterConfig};

/// More steps are a mistake; refused here, they cannot exhaust the memory.
const MAX_STEPS: usize = 1024;

/// An Eagle3 drafter's architecture.
#[derive(Debug, Clone, PartialEq)]
pub struct Eagle3Config {
    /// Its decoder and where the target is tapped.
    pub decoder: DraftDecoder,
    /// Steps it was trained for, and drafted tokens per block.
    pub ttt_length: usize,
    /// The loss of step s weighs this to the power of s; kept for information.
    pub step_loss_decay: f64,
}

impl DrafterConfig for Eagle3Config {
    const CLASS: &'static str = "Eagle3Model";

    fn load(dir: &Path) -> Result<Self, ModelError> {
        let (path, map) = read_json(dir)?;
        let decoder = DraftDecoder::read(&path, &map)?;
        let fields = Fields::new(&path, &map);
        let size = |key: &str| fields.required_size::<u64>(key);
        let layers = decoder.model.layers.len();
        if let Some(found) =
            fields.size::<i64>("draft_num_hidden_layers")?.filter(|&found| found != layers as i64)
        {
            let problem = format!("{found}, but num_hidden_layers is {layers}");
            return Err(fields.error("draft_num_hidden_layers", problem).into());
        }
        let config = Self {
            ttt_length: size("ttt_length")? as usize,
            step_loss_decay: fields.number("step_loss_decay")?.unwrap_or(0.8),
            decoder,
        };
        config.validate().map_err(|(key, problem)| fields.error(key, problem))?;
        Ok(config)
    }

    fn decoder(&self) -> &DraftDecoder {
        &self.decoder
    }

    fn decoder_mut(&mut self) -> &mut DraftDecoder {
        &mut self.decoder
    }

    fn draft_len(&self) -> usize {
        self.ttt_length
    }

    fn to_json(&self) -> Map<String, Value> {
        let mut map = self.decoder.to_json(&self.architecture());
        map.insert("ttt_length".into(), json!(self.ttt_length));
        map.insert("step_loss_decay".into(), json!(self.step_loss_decay));
        map.insert("draft_num_hidden_layers".into(), json!(self.decoder.model.layers.len()));
        map
    }
}

impl Eagle3Config {
    /// Checks the fields against each other; the error is a key and what is wrong with it.
    ///
    /// # Errors
    /// If they contradict each other.
    pub fn validate(&self) -> Result<(), ConfigIssue> {
        self.decoder.check()?;
        if self.decoder.model.layers.iter().any(|layer| layer.attention.window.is_some()) {
            return Err(("layer_types", "Eagle3 layers with a sliding window are not supported".into()));
        }
        if !(1..=MAX_STEPS).contains(&self.ttt_length) {
            return Err(("ttt_length", format!("{} is not between 1 and {MAX_STEPS}", self.ttt_length)));
        }
        Ok(())
    }
}
