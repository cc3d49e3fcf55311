//! Keys that the checkpoints of all block drafters share.

use deepspec_checkpoint::{CheckpointError, Fields};
use deepspec_core::Slots;

/// Keys of the Markov head and of the confidence head.
pub const HEADS: [&str; 4] =
    ["markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"];

/// The architecture of block drafters in llama.cpp.
pub const GGUF_ARCHITECTURE: &str = "dflash";

/// More slots of a block are a mistake.
const MAX_BLOCK: u64 = 1024;

/// `block_size`, of which at least one slot drafts.
pub fn block_size(fields: &Fields, slots: Slots) -> Result<u64, CheckpointError> {
    let (key, least) = ("block_size", slots.first() as u64 + 1);
    match fields.required_size(key)? {
        size if (least..=MAX_BLOCK).contains(&size) => Ok(size),
        size => Err(fields.error(key, format!("{size} is not between {least} and {MAX_BLOCK}"))),
    }
}

/// `mask_token_id` within the vocabulary.
pub fn mask_token(fields: &Fields, vocab: u64) -> Result<u64, CheckpointError> {
    let key = "mask_token_id";
    let id = fields.required(key, fields.count(key)?)?;
    if id < vocab {
        return Ok(id);
    }
    Err(fields.error(key, format!("{id} is outside of the vocabulary of {vocab}")))
}
