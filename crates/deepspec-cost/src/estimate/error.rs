//! Errors of reading measurement files and accelerators.

use std::path::PathBuf;

use deepspec_core::atomic::FileError;

/// Reasons why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ScaleError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file has other contents than expected.
    #[error("{}: {problem}", path.display())]
    Content {
        /// Path of the file.
        path: PathBuf,
        /// The contents found and expected.
        problem: String,
    },
    /// Neither an accelerator nor a file has this name.
    #[error("--hardware {name}: no such file, and none of {known}")]
    Hardware {
        /// The requested name.
        name: String,
        /// The known accelerators.
        known: String,
    },
}
