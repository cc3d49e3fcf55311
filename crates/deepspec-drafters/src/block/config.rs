//! What a block drafter is, read from and written to its checkpoint's config.json.

use std::path::Path;

use deepspec_models::config::{Fields, read_json};
use deepspec_models::{ModelConfig, ModelError};
use serde_json::{Map, Value, json};

use super::recipe::{Markov, MarkovKind};
use crate::trained::{self, DrafterConfig, Transfer};

/// Classes of checkpoints are this behind the prefix of a family.
pub(super) const CLASS: &str = "DSparkModel";

/// Sizes past these are mistakes; refused here, they cannot exhaust the memory.
const MAX_BLOCK: usize = 1024;
const MAX_RANK: i64 = 1 << 20;

/// The confidence head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Confidence {
    /// Whether it reads the previous token's Markov embedding beside the hidden state.
    pub with_markov: bool,
}

/// A block drafter's architecture.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockConfig {
    /// The decoder's sizes; its layers are the draft layers.
    pub model: ModelConfig,
    /// γ.
    pub block_size: usize,
    /// Stands for the tokens to be predicted.
    pub mask_token_id: i64,
    /// Target layers it reads, strictly increasing; −1 is the embedding.
    pub target_layer_ids: Vec<i64>,
    /// Layers of the target.
    pub num_target_layers: usize,
    /// Anchors per training sequence, kept for information.
    pub num_anchors: usize,
    /// Markov head, if any.
    pub markov: Option<Markov>,
    /// Confidence head, if any.
    pub confidence: Option<Confidence>,
}

impl DrafterConfig for BlockConfig {
    fn load(dir: &Path) -> Result<Self, ModelError> {
        let (path, map) = read_json(dir)?;
        let model = ModelConfig::parse(&path, map.clone())?;
        let fields = Fields::new(&path, &map);
        let size = |key: &str| fields.size(key).and_then(|value| fields.required(key, value));
        let rank = rank(&fields)?;
        let markov = match (rank, fields.text("markov_head_type")?.as_deref()) {
            (0, _) => None,
            (rank, None | Some("vanilla")) => Some(Markov { kind: MarkovKind::Vanilla, rank }),
            (rank, Some("gated")) => Some(Markov { kind: MarkovKind::Gated, rank }),
            (rank, Some("rnn")) => Some(Markov { kind: MarkovKind::Rnn, rank }),
            (_, Some(other)) => {
                return Err(fields.error(
                    "markov_head_type",
                    format!("\"{other}\" is unknown; expected vanilla, gated or rnn"),
                ));
            }
        };
        let confidence = fields.flag("enable_confidence_head")?.unwrap_or(false).then_some(());
        let with_markov = fields.flag("confidence_head_with_markov")?.unwrap_or(false);
        let config = Self {
            block_size: size("block_size")? as usize,
            mask_token_id: fields
                .required("mask_token_id", map.get("mask_token_id").and_then(Value::as_i64))?,
            target_layer_ids: fields.required("target_layer_ids", fields.integers("target_layer_ids")?)?,
            num_target_layers: size("num_target_layers")? as usize,
            num_anchors: fields.size("num_anchors")?.unwrap_or(512) as usize,
            confidence: confidence.map(|()| Confidence { with_markov }),
            markov,
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
        self.block_size
    }

    fn mask_token_id(&self) -> Option<i64> {
        Some(self.mask_token_id)
    }

    fn set_mask_token_id(&mut self, id: i64) {
        self.mask_token_id = id;
    }

    fn shrink(&mut self) {
        self.mask_token_id = 0;
        self.num_anchors = 1;
        self.markov = self.markov.map(|markov| Markov { rank: 8, ..markov });
    }

    /// Heads that the other drafter does not have stay fresh.
    fn transfer(&self, from: &Self, transfer: &mut Transfer) {
        transfer.compare("block_size", &from.block_size, &self.block_size);
        transfer.compare("mask_token_id", &from.mask_token_id, &self.mask_token_id);
        match from.markov {
            Some(_) => transfer.compare("markov", &from.markov, &self.markov),
            None => transfer.may_be_fresh.push("markov_head."),
        }
        match from.confidence {
            Some(_) => transfer.compare("confidence", &from.confidence, &self.confidence),
            None => transfer.may_be_fresh.push("confidence_head."),
        }
    }

    fn to_json(&self) -> Map<String, Value> {
        let (taps, target_layers) = (&self.target_layer_ids, self.num_target_layers);
        let mut map = trained::to_json(&self.model, &self.architecture(), taps, target_layers);
        map.insert("block_size".into(), json!(self.block_size));
        map.insert("mask_token_id".into(), json!(self.mask_token_id));
        map.insert("num_anchors".into(), json!(self.num_anchors));
        map.insert("markov_rank".into(), json!(self.markov.map_or(0, |markov| markov.rank)));
        match self.markov {
            Some(markov) => map.insert("markov_head_type".into(), json!(markov.kind)),
            None => map.remove("markov_head_type"),
        };
        map.insert("enable_confidence_head".into(), json!(self.confidence.is_some()));
        match self.confidence {
            Some(confidence) => {
                map.insert("confidence_head_with_markov".into(), json!(confidence.with_markov))
            }
            None => map.remove("confidence_head_with_markov"),
        };
        map
    }
}

impl BlockConfig {
    /// Checks the fields against each other; the error is a key and what is wrong with it.
    ///
    /// # Errors
    /// If they contradict each other.
    pub fn validate(&self) -> Result<(), (&'static str, String)> {
        trained::check(&self.model, &self.target_layer_ids, self.num_target_layers)?;
        if !(1..=MAX_BLOCK).contains(&self.block_size) {
            return Err(("block_size", format!("{} is not between 1 and {MAX_BLOCK}", self.block_size)));
        }
        if let Some(markov) = self.markov.filter(|markov| !(1..=MAX_RANK).contains(&markov.rank)) {
            return Err(("markov_rank", format!("{} is not between 1 and {MAX_RANK}", markov.rank)));
        }
        if !(0..self.model.vocab_size).contains(&self.mask_token_id) {
            let (id, last) = (self.mask_token_id, self.model.vocab_size - 1);
            let problem = format!("{id} is outside the vocabulary, which ends at {last}");
            return Err(("mask_token_id", problem));
        }
        if self.confidence.is_some_and(|confidence| confidence.with_markov) && self.markov.is_none() {
            return Err((
                "confidence_head_with_markov",
                "the confidence head wants the Markov embedding, but there is no Markov head".into(),
            ));
        }
        Ok(())
    }
}

/// `markov_rank`, where 0 or absence means no head.
fn rank(fields: &Fields) -> Result<i64, ModelError> {
    match fields.map.get("markov_rank") {
        None | Some(Value::Null) => Ok(0),
        Some(value) => {
            let rank = value.as_i64().filter(|rank| (0..=MAX_RANK).contains(rank));
            rank.ok_or_else(|| {
                fields.error("markov_rank", format!("expected an integer from 0, found {value}"))
            })
        }
    }
}
