//! Blocks of a drafter, read from and written to its checkpoint's config.json.

use deepspec_checkpoint::{CheckpointError, Fields};
use deepspec_core::Slots;
use serde_json::{Map, Value, json};

use crate::{ConfigIssue, WarmStart};

/// More slots are a mistake; refused here, they cannot exhaust the memory.
const MAX_BLOCK: usize = 1024;
/// A larger rank of a head is a mistake; refused where configs are read, it cannot exhaust the memory.
pub const MAX_RANK: i64 = 1 << 20;
/// Whether the anchor's own slot drafts, as vLLM and SGLang know it.
const SAMPLE_FROM_ANCHOR: &str = "sample_from_anchor";

/// Anchors per sequence where neither recipe nor config says.
pub fn num_anchors() -> usize {
    512
}

/// Blocks `[anchor, mask, …]` behind anchors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSpec {
    /// B, slots of a block, the anchor's included.
    pub block_size: usize,
    /// Tokens that the slots predict.
    pub slots: Slots,
    /// Stands for the tokens to be predicted.
    pub mask_token_id: i64,
    /// Anchors per training sequence, kept for information.
    pub num_anchors: usize,
}

impl BlockSpec {
    /// γ, tokens drafted per block.
    pub fn drafted(&self) -> usize {
        self.slots.drafted(self.block_size)
    }

    /// Reads them; a config without `sample_from_anchor` has the `default` slots.
    ///
    /// # Errors
    /// If a key is missing or of a wrong type.
    pub fn read(fields: &Fields, default: Slots) -> Result<Self, CheckpointError> {
        let mask = "mask_token_id";
        let slots = match fields.flag(SAMPLE_FROM_ANCHOR)? {
            Some(true) => Slots::AnchorPredicts,
            Some(false) => Slots::FillIn,
            None => default,
        };
        Ok(Self {
            block_size: fields.required_size::<u64>("block_size")? as usize,
            slots,
            mask_token_id: fields.required(mask, fields.count(mask)?)? as i64,
            num_anchors: fields
                .size::<i64>("num_anchors")?
                .map_or_else(num_anchors, |anchors| anchors as usize),
        })
    }

    /// Writes them, without the number of anchors. Without the flag for slots, every slot drafts.
    pub fn write(&self, map: &mut Map<String, Value>) {
        map.insert("block_size".into(), json!(self.block_size));
        map.insert("mask_token_id".into(), json!(self.mask_token_id));
        if self.slots == Slots::FillIn {
            map.insert(SAMPLE_FROM_ANCHOR.into(), json!(false));
        }
    }

    /// Checks them for a vocabulary of so many tokens.
    ///
    /// # Errors
    /// A key and what is wrong with it.
    pub fn check(&self, vocab_size: i64) -> Result<(), ConfigIssue> {
        let least = self.slots.first() + 1;
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

    /// As small as they can be.
    pub fn shrink(&mut self) {
        (self.mask_token_id, self.num_anchors) = (0, 1);
    }

    /// See [`crate::DrafterSettings::compare_for_warm_start`].
    pub fn compare_for_warm_start(&self, from: &Self, transfer: &mut WarmStart) {
        transfer.compare("block_size", from.block_size, self.block_size);
        transfer.compare("slots", from.slots.name(), self.slots.name());
        transfer.compare("mask_token_id", from.mask_token_id, self.mask_token_id);
    }
}
