//! What can be wrong with a checkpoint, or with the wish to convert it.

use std::path::PathBuf;

use crate::gguf::GgufError;
use deepspec_core::atomic::FileError;

/// A checkpoint that cannot be read or converted.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The folder or file is no checkpoint of a known dialect.
    #[error("{}: {problem}", path.display())]
    NotADrafter {
        /// The folder or file.
        path: PathBuf,
        /// What is missing or wrong.
        problem: String,
    },
    /// A key of config.json is missing, of a wrong type, or contradicts another.
    #[error("{}: `{key}`: {problem}", path.display())]
    Key {
        /// The config file.
        path: PathBuf,
        /// The key, with those that lead to it.
        key: String,
        /// What was found and what was expected.
        problem: String,
    },
    /// A tensor is missing, misshapen, or of no use to the config.
    #[error("{}: tensor `{name}`: {problem}", path.display())]
    Tensor {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor's name in the file.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// Something else is where the result is to be written.
    #[error("{} exists already and holds something else; --overwrite replaces it", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// The checkpoint is sound, but must not or cannot be said in the other dialect.
    #[error("{}: not convertible to {to}: {reason}", path.display())]
    Refused {
        /// The checkpoint.
        path: PathBuf,
        /// The layout asked for.
        to: &'static str,
        /// Why.
        reason: String,
    },
}

impl From<GgufError> for CheckpointError {
    fn from(GgufError { path, problem }: GgufError) -> Self {
        Self::NotADrafter { path, problem }
    }
}
