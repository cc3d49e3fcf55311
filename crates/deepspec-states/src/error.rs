//! Why there are no states.

use std::path::PathBuf;

use deepspec_cache::CacheError;
use deepspec_core::atomic::FileError;
use deepspec_models::ModelError;
use deepspec_text::TextError;

/// A recipe, input or target from which no states can be made. Every message is one line.
#[derive(Debug, thiserror::Error)]
pub enum StatesError {
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The target cannot be loaded.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tokenizer cannot be loaded.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The cache cannot be built.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A value of the recipe does not fit the target.
    #[error("`{key}`: {problem}")]
    Recipe {
        /// Dotted path of the key.
        key: &'static str,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// The tokenizer has ids for which the target has no embedding.
    #[error("{}: the tokenizer has ids up to {}, the model's vocabulary ends at {}; copy the tokenizer of this model", dir.display(), ids - 1, vocab_size - 1)]
    Vocabulary {
        /// The target's folder.
        dir: PathBuf,
        /// Ids of the tokenizer, counted to the largest.
        ids: usize,
        /// Rows of the target's embedding.
        vocab_size: usize,
    },
}
