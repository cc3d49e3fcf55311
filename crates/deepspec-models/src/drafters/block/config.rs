//! What a block drafter is, read from and written to its checkpoint's config.json.

use std::path::Path;

use deepspec_core::cli::UsageError;
use deepspec_core::recipe::{Markov, MarkovKind};
use serde_json::{Map, Value, json};

use crate::ModelError;
use crate::config::{Fields, MAX_LAYERS, ModelConfig, read_json};
use crate::families::Family;
use crate::target::check_taps;

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

impl BlockConfig {
    /// Reads `dir/config.json`.
    ///
    /// # Errors
    /// If a key is missing, of a wrong type, or contradicts another.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        let (path, map) = read_json(dir)?;
        let model = ModelConfig::parse(&path, map.clone())?;
        let fields = Fields::new(&path, &map);
        let size = |key: &str| fields.size(key).and_then(|value| fields.required(key, value));
        let rank = fields.typed_rank()?;
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
        if config.model.family != Family::Qwen3 {
            let problem = format!("block drafters built like {} are not supported", config.model.family);
            return Err(fields.error("model_type", problem));
        }
        config.validate().map_err(|(key, problem)| fields.error(key, problem))?;
        Ok(config)
    }

    /// Checks the fields against each other; the error is a key and what is wrong with it.
    ///
    /// # Errors
    /// If they contradict each other.
    pub fn validate(&self) -> Result<(), (&'static str, String)> {
        let limits = [
            ("block_size", self.block_size, MAX_BLOCK),
            ("num_hidden_layers", self.model.layers.len(), MAX_LAYERS),
        ];
        if let Some((key, found, most)) =
            limits.into_iter().find(|(_, found, most)| !(1..=*most).contains(found))
        {
            return Err((key, format!("{found} is not between 1 and {most}")));
        }
        if let Some(markov) = self.markov.filter(|markov| !(1..=MAX_RANK).contains(&markov.rank)) {
            return Err(("markov_rank", format!("{} is not between 1 and {MAX_RANK}", markov.rank)));
        }
        if !(0..self.model.vocab_size).contains(&self.mask_token_id) {
            let problem =
                format!("{} is outside the vocabulary of {}", self.mask_token_id, self.model.vocab_size);
            return Err(("mask_token_id", problem));
        }
        if self.target_layer_ids.is_empty() {
            return Err(("target_layer_ids", "at least one target layer is needed".into()));
        }
        check_taps(&self.target_layer_ids, self.num_target_layers)
            .map_err(|error| ("target_layer_ids", error.to_string()))?;
        if self.confidence.is_some_and(|confidence| confidence.with_markov) && self.markov.is_none() {
            return Err((
                "confidence_head_with_markov",
                "the confidence head wants the Markov embedding, but there is no Markov head".into(),
            ));
        }
        Ok(())
    }

    /// Whether a target of this architecture can be drafted for.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] naming what differs.
    pub fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError> {
        let pairs = [
            ("vocab_size", self.model.vocab_size, target.vocab_size),
            ("hidden_size", self.model.hidden_size, target.hidden_size),
            ("number of target layers", self.num_target_layers as i64, target.layers.len() as i64),
        ];
        let mut differences: Vec<String> = pairs
            .iter()
            .filter(|(_, drafter, target)| drafter != target)
            .map(|(what, drafter, target)| format!("{what} {target}, the drafter was trained for {drafter}"))
            .collect();
        if self.model.family != target.family {
            let (target, drafter) = (target.family, self.model.family);
            differences.push(format!("the architecture of {target}, the drafter was trained for {drafter}"));
        }
        if differences.is_empty() {
            return Ok(());
        }
        Err(ModelError::Mismatch(UsageError(format!(
            "the drafter does not belong to this target: the target has {}",
            differences.join("; ")
        ))))
    }

    /// The checkpoint's config.json: the target's with the drafter's keys on top.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut map = self.model.raw.clone();
        let layers = self.model.layers.len();
        map.insert("architectures".into(), json!(["Qwen3DSparkModel"]));
        map.insert("model_type".into(), json!("qwen3"));
        map.insert("num_hidden_layers".into(), json!(layers));
        map.insert("num_target_layers".into(), json!(self.num_target_layers));
        map.insert("layer_types".into(), json!(vec!["full_attention"; layers]));
        map.insert("tie_word_embeddings".into(), json!(false));
        map.insert("dtype".into(), json!("bfloat16"));
        map.remove("torch_dtype");
        map.insert("block_size".into(), json!(self.block_size));
        map.insert("mask_token_id".into(), json!(self.mask_token_id));
        map.insert("target_layer_ids".into(), json!(self.target_layer_ids));
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

impl Fields<'_> {
    /// `markov_rank`, where 0 or absence means no head.
    fn typed_rank(&self) -> Result<i64, ModelError> {
        match self.map.get("markov_rank") {
            None | Some(Value::Null) => Ok(0),
            Some(value) => {
                let rank = value.as_i64().filter(|rank| (0..=MAX_RANK).contains(rank));
                rank.ok_or_else(|| {
                    self.error("markov_rank", format!("expected an integer from 0, found {value}"))
                })
            }
        }
    }
}
