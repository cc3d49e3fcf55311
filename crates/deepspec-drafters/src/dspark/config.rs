//! What a block drafter is, read from and written to its checkpoint's config.json.

use std::path::Path;

use deepspec_checkpoint::Fields;
use deepspec_core::Slots;
use deepspec_models::ModelError;
use deepspec_models::config::read_json;
use serde_json::{Map, Value, json};
use tch::{Device, Kind};

use super::recipe::{Markov, MarkovKind};
use crate::block_common::{BlockBatch, BlockSpec, MAX_RANK};
use crate::draft_model::{DraftDecoder, DrafterConfig, WarmStart};
use crate::{ConfigIssue, TrainSample};

/// The confidence head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Confidence {
    /// Whether it reads the previous token's Markov embedding beside the hidden state.
    pub with_markov: bool,
}

/// A block drafter's architecture.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockConfig {
    /// Its decoder and where the target is tapped.
    pub decoder: DraftDecoder,
    /// Its blocks.
    pub blocks: BlockSpec,
    /// Markov head, if any.
    pub markov: Option<Markov>,
    /// Confidence head, if any.
    pub confidence: Option<Confidence>,
}

impl DrafterConfig for BlockConfig {
    const CLASS: &'static str = "DSparkModel";

    fn load(dir: &Path) -> Result<Self, ModelError> {
        let (path, map) = read_json(dir)?;
        let fields = Fields::new(&path, &map);
        let rank = rank(&fields)?;
        let key = "markov_head_type";
        let named = fields.text(key)?;
        let kind = MarkovKind::parse(named.unwrap_or("vanilla"));
        let markov = match rank {
            0 => None,
            rank => Some(Markov { kind: kind.map_err(|problem| fields.error(key, problem))?, rank }),
        };
        let confidence = fields.flag("enable_confidence_head")?.unwrap_or(false).then_some(());
        let with_markov = fields.flag("confidence_head_with_markov")?.unwrap_or(false);
        let config = Self {
            decoder: DraftDecoder::read(&path, &map)?,
            blocks: BlockSpec::read(&fields, Slots::AnchorPredicts)?,
            confidence: confidence.map(|()| Confidence { with_markov }),
            markov,
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
        self.blocks.drafted()
    }

    fn anchored(&self) -> Option<&BlockSpec> {
        Some(&self.blocks)
    }

    fn anchored_mut(&mut self) -> Option<&mut BlockSpec> {
        Some(&mut self.blocks)
    }

    fn shrink(&mut self) {
        self.blocks.shrink();
        self.markov = self.markov.map(|markov| Markov { rank: 8, ..markov });
    }

    /// Heads that the other drafter does not have stay fresh.
    fn transfer(&self, from: &Self, transfer: &mut WarmStart) {
        self.blocks.transfer(&from.blocks, transfer);
        match from.markov {
            Some(_) => transfer.compare_words("markov", from.markov_words(), self.markov_words()),
            None => transfer.may_be_fresh.push("markov_head."),
        }
        match from.confidence {
            Some(_) => transfer.compare_words("confidence", from.confidence_words(), self.confidence_words()),
            None => transfer.may_be_fresh.push("confidence_head."),
        }
    }

    fn to_json(&self) -> Map<String, Value> {
        let mut map = self.decoder.to_json(&self.architecture());
        self.blocks.write(&mut map);
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
    fn markov_words(&self) -> String {
        self.markov
            .map_or("none".into(), |head| format!("{:?}, rank {}", head.kind, head.rank).to_lowercase())
    }

    fn confidence_words(&self) -> String {
        self.confidence.map_or("none".into(), |head| {
            if head.with_markov {
                "with Markov embeddings".into()
            } else {
                "without Markov embeddings".into()
            }
        })
    }

    /// The tensors of one pass over samples; see [`BlockBatch::new`].
    pub fn batch(
        &self,
        samples: &[TrainSample],
        decay_gamma: f64,
        device: Device,
        kind: Kind,
    ) -> Option<BlockBatch> {
        BlockBatch::new(samples, &self.blocks, self.markov.is_some(), decay_gamma, device, kind)
    }

    /// Checks the fields against each other; the error is a key and what is wrong with it.
    ///
    /// # Errors
    /// If they contradict each other.
    pub fn validate(&self) -> Result<(), ConfigIssue> {
        self.decoder.check()?;
        self.blocks.check(self.decoder.model.vocab_size)?;
        if let Some(markov) = self.markov.filter(|markov| !(1..=MAX_RANK).contains(&markov.rank)) {
            return Err(("markov_rank", format!("{} is not between 1 and {MAX_RANK}", markov.rank)));
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
            let problem = || format!("expected an integer from 0, found {value}");
            Ok(rank.ok_or_else(|| fields.error("markov_rank", problem()))?)
        }
    }
}
