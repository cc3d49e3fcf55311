//! GGUF, the format of llama.cpp's models: metadata and tensors in one file.
//!
//! Version 3, little-endian: the magic `GGUF`, the version as u32, the numbers of tensors and of metadata entries as u64; the entries; for each
//! tensor its name, its dimensions (fastest first, so reversed to those of safetensors), type and offset; and, aligned to 32 bytes each, the
//! tensors' data. Strings are a u64 length and UTF-8.
//!
//! Drafters are written with a [`Writer`]. Targets are read as a [`Model`], under the names that transformers has for things; [`unpack`] makes
//! the folder of one.

mod blocks;
mod error;
mod model;
mod names;
mod reader;
mod rotation;
mod splits;
mod tokenizer;
mod unpack;
mod vocabulary;
mod writer;

pub use blocks::BlockType;
pub use error::GgufError;
pub use model::{Llama3, Model, ROPE_FACTORS};
pub use names::LAYER_NAMES;
pub use reader::{Entry, Gguf, Stored};
pub use rotation::pairs;
pub use tokenizer::Tokenizer;
pub use unpack::{LINK, unpack};
pub use writer::{Tensor, TensorType, Value, Writer};

const MAGIC: &[u8; 4] = b"GGUF";
/// Where data begin, in bytes.
const ALIGNMENT: u64 = 32;
