//! GGUF, the format of llama.cpp's models: metadata and tensors in one file.
//!
//! Version 3, little-endian: the magic `GGUF`, the version as u32, the numbers of tensors and of metadata entries as u64; the entries; for each
//! tensor its name, its dimensions (fastest first, so reversed to those of safetensors), type and offset; and, aligned to 32 bytes each, the
//! tensors' data. Strings are a u64 length and UTF-8.

mod tokenizer;
mod writer;

pub use tokenizer::{Tokenizer, TokenizerError};
pub use writer::{Tensor, TensorType, Value, Writer};
