//! Targets on libtorch, and modules that drafters share.
//!
//! Shapes: N rows (tokens), T context tokens of one sequence, d hidden size, m taps, V vocabulary. H heads, G key/value
//! heads, D head dim, S slots.

pub mod config;
mod error;
mod families;
mod head;
mod identity;
mod key_value_layer;
pub mod nn;
mod room;
mod target;
mod weights;

pub use config::{Family, ModelConfig, TargetFamily};
pub use deepspec_checkpoint::MAX_SHARD_BYTES;
pub use error::ModelError;
pub use families::{SHAPES_WITHOUT_FAMILY, chat_formats, families, text_model_type};
pub use head::{TargetHead, final_state_factor};
pub use identity::{config_digest, outer_tensors_digest, probed_weights_digest, stop_ids, weights_digest};
pub use key_value_layer::KeyValueLayer;
pub use room::{MemoryFit, check_memory_fit, kv_cache_budget};
pub use target::{TargetModel, TargetOptions, VERIFY_BYTES_PER_LOGIT, check_taps, load_embed_and_head};
pub use weights::{Weights, save, save_checkpoint};
