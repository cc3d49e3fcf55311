//! Checkpoint formats: reads and writes drafters in the formats of several tools, and [`gguf`]
//! files.
//!
//! A [`Checkpoint`] is a folder whose format is detected from config.json and tensor names. It is
//! read into one format-independent [`Drafter`]. [`convert`] plans the same drafter in another
//! format: it copies weights byte for byte and changes names and config. It refuses settings that
//! the other format cannot express or would interpret differently, with the reason. Each drafter
//! kind describes itself to the formats by a [`Reader`] and its [`KindSettings`].
//!
//! Layer ids follow the reference: id L is the output of decoder layer L. Some formats count from
//! the embedding (L + 1); their readers convert the ids.
//!
//! This crate computes with weights only to quantise and de-quantise them, and does not link libtorch.

mod checkpoint;
mod compatibility;
mod convert;
mod draft_vocab;
mod drafter;
mod embedded;
mod engines;
mod error;
mod experts;
mod export;
mod families;
mod fields;
mod folder;
mod format;
pub mod gguf;
mod gguf_export;
mod kind;
mod layouts;
mod numbers;
mod quantised;
mod rope;
mod serving;
mod shapes;
mod shards;
mod target;
mod tensors;
mod write;

pub use checkpoint::Checkpoint;
pub use compatibility::{EngineCompatibility, engine_compatibility, loading_engines};
pub use convert::{Converted, convert};
pub use draft_vocab::{D2T, DraftVocab};
pub use drafter::{Drafter, Incompatibility, KindSettings, SGLANG_HAS_NO_USE_SWA, Settings, TensorShapes};
pub use embedded::{MergedTarget, StoredAs, extract, merge, merge_into_deepseek_v4};
pub use engines::convert_for_engine;
pub use error::CheckpointError;
pub use experts::{EXPERTS_KEY, MAX_EXPERTS};
pub use export::{Engine, EngineSupport, ExportTarget};
pub use families::{DecoderFamily, Family};
pub use fields::Fields;
pub use format::CheckpointFormat;
pub use gguf::{TensorType, Value as GgufValue};
pub use gguf_export::GgufExport;
pub use kind::{DflashConfigKeys, GgufParts, ROPE_BASE_KEY, Speculators, json_map};
pub use layouts::{
    CAUSAL_KEYS, Decoder, DflashConfig, EMBEDDING_LAYER_ID, ExternalClass, KnownDrafters, Reader,
    SWA_WINDOW_SIZE, USE_SWA, find_unsupported_setting, names_bundled_drafter, read_attention_sinks,
    read_causal, read_draft_vocab_size, read_layer_ids, read_speculative_tokens, resolve_windows,
    unsupported_layout_message,
};
pub use quantised::{QUANTISATION_KEYS, mxfp4_to_float32, quantised_folder_message};
pub use serving::{Risk, risks};
pub use shapes::{ADD_SWA_ATTENTION_SINK_BIAS, ATTENTION_SINK_BIAS, OUTPUT_GATE_KEY};
pub use shards::{
    MAX_SHARD_BYTES, Shard, is_layer_tensor, no_weights_message, split_into_shards, write_index,
};
pub use target::Target;
pub use tensors::{TensorMetadata, Tensors, is_readable, quantised_dtype_message, torch_dtype_name};
