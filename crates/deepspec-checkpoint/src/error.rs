//! Errors of reading and converting checkpoints.

use std::path::PathBuf;

use crate::gguf::GgufError;
use deepspec_core::atomic::FileError;

/// A checkpoint that cannot be read or converted.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The folder or file is no checkpoint of a known format.
    #[error("{}: {problem}", path.display())]
    NotADrafter {
        /// The folder or file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A key of config.json is missing, of a wrong type, or contradicts another.
    #[error("{}: `{key}`: {problem}", path.display())]
    Key {
        /// The config file.
        path: PathBuf,
        /// The key, with the path of its parent keys.
        key: String,
        /// The value found and the value expected.
        problem: String,
    },
    /// A tensor is missing, has a wrong shape, or does not belong to the config.
    #[error("{}: tensor `{name}`: {problem}", path.display())]
    Tensor {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor's name in the file.
        name: String,
        /// The problem.
        problem: String,
    },
    /// The destination exists with other content.
    #[error("{} exists already and holds something else; --overwrite replaces it", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// The checkpoint is valid, but the other format cannot express it.
    #[error("{}: not convertible to {to}: {reason}", path.display())]
    Refused {
        /// The checkpoint.
        path: PathBuf,
        /// The requested format.
        to: &'static str,
        /// The reason.
        reason: String,
    },
}

impl From<GgufError> for CheckpointError {
    fn from(GgufError { path, problem }: GgufError) -> Self {
        Self::NotADrafter { path, problem }
    }
}
