//! Keys that the checkpoints of all block drafters share.

use deepspec_checkpoint::{CheckpointError, Fields};
use serde_json::{Map, Value};

/// Keys of the Markov head and of the confidence head.
pub const HEADS: [&str; 4] =
    ["markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"];

/// The architecture of block drafters in llama.cpp.
pub const GGUF_ARCHITECTURE: &str = "dflash";

/// SGLang's refusal of the speculators format.
pub const SGLANG_SPECULATORS: &str =
    "speculators_model_type was refused when read (issues 30982, 34734); convert to sglang";

/// The keys of `dflash_config`, with the `block_size` that may stand outside of it.
///
/// # Errors
/// If `block_size` stands at both places with different values.
pub fn with_outer_block_size(outer: &Fields, inner: &Fields) -> Result<Map<String, Value>, CheckpointError> {
    let mut keys = inner.map.clone();
    if let Some(outside) = outer.size::<u64>("block_size")? {
        let inside = keys.entry("block_size").or_insert(outside.into());
        if *inside != outside {
            return Err(outer.error("block_size", format!("{outside}, and in dflash_config {inside}")));
        }
    }
    Ok(keys)
}
