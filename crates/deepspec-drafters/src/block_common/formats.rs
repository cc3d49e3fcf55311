//! Keys that the checkpoints of all block drafters share.

use deepspec_checkpoint::{CheckpointError, Fields};
use serde_json::{Map, Value};

/// Keys of the Markov head and of the confidence head in config.json.
pub const HEAD_KEYS: [&str; 4] =
    ["markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"];

/// Architecture name of block drafters in GGUF files.
pub const GGUF_ARCHITECTURE: &str = "dflash";

/// Why SGLang cannot load the speculators format.
pub const SGLANG_REFUSAL: &str = "speculators_model_type was refused when read (issues 30982, 34734)";

/// Keys of `dflash_config`, with `block_size` added if the key is at the top level. Fails if `dflash_config` and the top level have
/// different values.
pub fn merge_outer_block_size(outer: &Fields, inner: &Fields) -> Result<Map<String, Value>, CheckpointError> {
    let mut keys = inner.map.clone();
    keys.retain(|key, value| key != "num_anchors" && !value.is_null()); // num_anchors is for information
    if let Some(outside) = outer.size::<u64>("block_size")? {
        let inside = keys.entry("block_size").or_insert(outside.into());
        if *inside != outside {
            return Err(outer.error("block_size", format!("{outside}, and in dflash_config {inside}")));
        }
    }
    Ok(keys)
}
