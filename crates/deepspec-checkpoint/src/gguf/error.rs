//! Errors of GGUF files.

use std::path::PathBuf;

/// A file that is no usable GGUF, or a tokenizer that cannot be written to one.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct GgufError {
    /// The file.
    pub path: PathBuf,
    /// The problem, naming the key or tensor.
    pub problem: String,
}
