//! Errors of models on disk.

use std::path::PathBuf;

use deepspec_checkpoint::CheckpointError;
use deepspec_core::atomic::FileError;
use deepspec_core::cli::UsageError;

/// A model that cannot be loaded or does not fit.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The folder is not a model.
    #[error("{}: {problem}", path.display())]
    NotAModel {
        /// The folder or file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A key of config.json is missing, of a wrong type or unsupported.
    #[error("{}: `{key}`: {problem}", path.display())]
    Config {
        /// The config file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The value found, and the expected one.
        problem: String,
    },
    /// A tensor is not in the checkpoint.
    #[error("{}: no tensor `{name}`; {}", path.display(), like.as_ref().map_or_else(
        || format!("is this a {expected} checkpoint?"),
        |like| format!("it has `{like}`: rename the tensors to those of a {expected} checkpoint"),
    ))]
    MissingTensor {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor's name.
        name: String,
        /// The model that was loaded.
        expected: String,
        /// A tensor of the checkpoint whose name has the same ending.
        like: Option<String>,
    },
    /// A tensor has another shape than the config says.
    #[error("{}: tensor `{name}` has shape {found:?}, the config wants {expected:?}", path.display())]
    Shape {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor's name.
        name: String,
        /// Shape in the file.
        found: Vec<i64>,
        /// Shape by the config.
        expected: Vec<i64>,
    },
    /// Target and drafter (or cache) do not belong together.
    #[error("{0}")]
    Mismatch(#[source] UsageError),
}

/// Files of weights are read by `deepspec-checkpoint`.
impl From<CheckpointError> for ModelError {
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::File(error) => Self::File(error),
            CheckpointError::NotADrafter { path, problem } => Self::NotAModel { path, problem },
            CheckpointError::Key { path, key, problem } => Self::Config { path, key, problem },
            CheckpointError::Tensor { path, name, problem } => {
                Self::NotAModel { path, problem: format!("tensor `{name}`: {problem}") }
            }
            CheckpointError::Exists { ref path } => {
                Self::NotAModel { path: path.clone(), problem: "exists already".into() }
            }
            CheckpointError::Refused { path, to, reason } => {
                Self::NotAModel { path, problem: format!("not convertible to {to}: {reason}") }
            }
        }
    }
}
