//! Shape of a drafter's blocks, read from and written to config.json.

use deepspec_checkpoint::{CAUSAL_KEYS, CheckpointError, Fields, read_causal};
use deepspec_core::SlotTarget;
use deepspec_ops::BlockShape;
use deepspec_ops::kv_attention::MaskKind;
use serde_json::{Map, Value, json};

use crate::{ConfigIssue, WarmStartCheck};

/// Upper limit of `block_size`. A larger value is a mistake that would exhaust memory.
const MAX_BLOCK: usize = 1024;
/// Upper limit of a head's rank. A larger value is a mistake that would exhaust memory.
pub const MAX_RANK: i64 = 1 << 20;
/// Config key of vLLM and SGLang: whether the anchor's slot drafts.
const SAMPLE_FROM_ANCHOR: &str = "sample_from_anchor";

/// Config key of SpecForge and vLLM: whether blocks are causal.
pub(crate) const IS_CAUSAL: &str = CAUSAL_KEYS[0];

/// Default number of anchors per training sequence.
pub fn default_num_anchors() -> usize {
    512
}

/// Shape of blocks `[anchor, mask, …]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSpec {
    /// Slots of a block including the anchor's, B.
    pub block_size: usize,
    /// Whether a slot predicts the token at its position or the next one.
    pub slots: SlotTarget,
    /// Input token of all slots except the anchor's.
    pub mask_token_id: i64,
    /// Whether a slot sees only itself and the slots before it. Otherwise the slots of a block see each other.
    pub causal: bool,
    /// Anchors per training sequence. Inference does not read it.
    pub num_anchors: usize,
}

impl BlockSpec {
    /// Drafted tokens per block, γ.
    pub fn draft_len(&self) -> usize {
        self.slots.draft_len(self.block_size)
    }

    /// Number of slots, and which of them a slot sees.
    pub fn shape(&self) -> BlockShape {
        let mask = if self.causal { MaskKind::Causal } else { MaskKind::Block };
        BlockShape { size: self.block_size, mask }
    }

    /// Reads the block's keys. A config without `sample_from_anchor` has the `default` slots.
    pub fn read(fields: &Fields, default: SlotTarget) -> Result<Self, CheckpointError> {
        let mask = "mask_token_id";
        let slots = match fields.flag(SAMPLE_FROM_ANCHOR)? {
            Some(true) => SlotTarget::AnchorPredicts,
            Some(false) => SlotTarget::FillIn,
            None => default,
        };
        Ok(Self {
            block_size: fields.required_size::<u64>("block_size")? as usize,
            slots,
            mask_token_id: fields.required(mask, fields.count(mask)?)? as i64,
            causal: read_causal(fields)?,
            num_anchors: fields
                .size::<i64>("num_anchors")?
                .map_or_else(default_num_anchors, |anchors| anchors as usize),
        })
    }

    /// Writes the block's keys except `num_anchors`. `sample_from_anchor` is written only if the slots fill in, and `is_causal` only if it
    /// is true.
    pub fn write(&self, map: &mut Map<String, Value>) {
        map.insert("block_size".into(), json!(self.block_size));
        map.insert("mask_token_id".into(), json!(self.mask_token_id));
        if self.slots == SlotTarget::FillIn {
            map.insert(SAMPLE_FROM_ANCHOR.into(), json!(false));
        }
        if self.causal {
            map.insert(IS_CAUSAL.into(), json!(true));
        }
    }

    /// Checks block size and mask token. An error is a key and its problem.
    pub fn check(&self, vocab_size: i64) -> Result<(), ConfigIssue> {
        let least = self.slots.first_drafting_position() + 1;
        if !(least..=MAX_BLOCK).contains(&self.block_size) {
            let problem = format!("{} is not between {least} and {MAX_BLOCK}", self.block_size);
            return Err(("block_size", problem));
        }
        if !(0..vocab_size).contains(&self.mask_token_id) {
            let (id, last) = (self.mask_token_id, vocab_size - 1);
            let problem = format!("{id} is outside the vocabulary, which ends at {last}");
            return Err(("mask_token_id", problem));
        }
        Ok(())
    }

    /// Sets the smallest mask token and number of anchors, for dummy runs.
    pub fn shrink(&mut self) {
        (self.mask_token_id, self.num_anchors) = (0, 1);
    }

    /// See [`crate::DrafterSettings::compare_for_warm_start`].
    pub fn compare_for_warm_start(&self, from: &Self, transfer: &mut WarmStartCheck) {
        transfer.compare("block_size", from.block_size, self.block_size);
        transfer.compare("slots", from.slots.name(), self.slots.name());
        transfer.compare("causal", from.causal, self.causal);
        transfer.compare("mask_token_id", from.mask_token_id, self.mask_token_id);
    }
}
