//! What can be wrong.

use std::path::PathBuf;

/// A file that is no GGUF, or one that cannot be used, or a tokenizer that cannot be put into one.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct GgufError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it, by key or tensor.
    pub problem: String,
}
