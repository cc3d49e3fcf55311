//! What can be wrong about files that say what was measured.

use std::path::PathBuf;

use deepspec_core::atomic::FileError;

/// Why a file tells nothing.
#[derive(Debug, thiserror::Error)]
pub enum ScaleError {
    /// It cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// It holds something else.
    #[error("{}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What was found, and what was expected.
        problem: String,
    },
    /// No accelerator of this name, and no such file.
    #[error("--hardware {name}: no such file, and none of {known}")]
    Hardware {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
}
