//! GGUF, the format of llama.cpp's models: metadata and tensors in one file.
//!
//! Version 3 is little-endian and has these parts in order:
//! - the magic `GGUF`, the version as u32, the numbers of tensors and of metadata entries as u64;
//! - the metadata entries;
//! - name, dimensions, type and offset of each tensor, with the fastest dimension first (the
//!   reverse of safetensors);
//! - the data of the tensors, each aligned to 32 bytes.
//!
//! Strings are a u64 length and UTF-8 bytes.
//!
//! A [`Writer`] writes drafters. A [`Model`] reads targets under the names of transformers, and
//! [`unpack`] creates a checkpoint folder of a target.

mod blocks;
mod error;
mod model;
mod names;
mod pre_tokenizer;
mod reader;
mod rope_layout;
mod rope_scaling;
mod tokenizer;
mod unpack;
mod vocabulary;
mod writer;

pub use blocks::BlockType;
pub use error::GgufError;
pub use model::{Model, ROPE_FACTORS};
pub use names::LAYER_NAMES;
pub use reader::{Entry, GgufFile, TensorInfo};
pub use rope_layout::to_interleaved;
pub use rope_scaling::{Llama3Scaling, YARN_BETAS, YarnScaling, yarn_attention_factor};
pub use tokenizer::Tokenizer;
pub use unpack::{GGUF_LINK, unpack};
pub use writer::{Tensor, TensorType, Value, Writer};

const MAGIC: &[u8; 4] = b"GGUF";
/// Alignment of tensor data, in bytes.
const ALIGNMENT_BYTES: u64 = 32;
