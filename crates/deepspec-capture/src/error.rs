//! Errors of hidden states.

use std::path::PathBuf;

use crate::cache::CacheError;
use deepspec_core::FinalStates;
use deepspec_core::atomic::FileError;
use deepspec_core::cli::UsageError;
use deepspec_hub::HubError;
use deepspec_models::ModelError;
use deepspec_text::TextError;

/// Why hidden states cannot be provided for a recipe, input or target. Every message is one line.
#[derive(Debug, thiserror::Error)]
pub enum StatesError {
    /// The target cannot be fetched.
    #[error(transparent)]
    Hub(#[from] HubError),
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
    /// There is no folder for tokenised samples.
    #[error(
        "no place for the tokenised samples: neither DEEPSPEC_CACHE nor HOME is set; let DEEPSPEC_CACHE name a folder"
    )]
    NoPlace,
    /// The folder for tokenised samples is not writable.
    #[error("{0}; tokenised samples want a folder with room: let DEEPSPEC_CACHE name one")]
    Unwritable(#[source] FileError),
    /// A file of tokenised samples that was just written is unusable.
    #[error("{}: {problem}", path.display())]
    Samples {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A value of the recipe does not fit the target.
    #[error("`{key}`: {problem}")]
    Recipe {
        /// Dotted path of the key.
        key: &'static str,
        /// The problem and the remedy.
        problem: String,
    },
    /// vLLM servers do not return the states.
    #[error("{problem}; this command starts a server for the recipe: {command}")]
    Servers {
        /// The problem, with the server's URL.
        problem: String,
        /// The `vllm serve` command.
        command: String,
    },
    /// The folder of the cache does not exist.
    #[error("{}: no such cache; build it with `deepspec-data cache build --config … --output-dir {}`", dir.display(), dir.display())]
    NoCache {
        /// The missing folder.
        dir: PathBuf,
    },
    /// A cache lacks final hidden states that the drafter trains on.
    #[error("{}: this cache keeps the last states of {kept} positions, and the drafter learns from those of {needed}; build one with `deepspec-data cache build --final-states {needed}`", dir.display())]
    FinalStates {
        /// The cache.
        dir: PathBuf,
        /// Which final states the cache stores.
        kept: FinalStates,
        /// Which final states are needed.
        needed: FinalStates,
    },
    /// A cache lacks the states of each sample's last token, which the drafter trains on.
    #[error("{}: this cache was built from the states of answers for a drafter that does not read those of a sample's last token; build one with this recipe, or take supervise: labels", dir.display())]
    LastTokenStates {
        /// The cache.
        dir: PathBuf,
    },
    /// A finished cache does not have the samples of the input.
    #[error("{}: this cache has no sample {sample:?} as data.input gives it; name another folder, or the files that it was made from", dir.display())]
    OtherSamples {
        /// The cache.
        dir: PathBuf,
        /// Id of the first missing or different sample.
        sample: String,
    },
}

impl StatesError {
    /// Converts an error of [`crate::TargetSpec::open`] for `main`: usage errors with exit code 2,
    /// except for failures of the hub or the network.
    pub fn report(self) -> anyhow::Error {
        match self {
            Self::Hub(error) => error.report(),
            other => UsageError(other.to_string()).into(),
        }
    }

    /// Converts an error of [`crate::Dataset::open`] for `main`. Exit code 2 if the recipe and its
    /// inputs do not fit together, 1 for damage and other failures.
    pub fn report_data(self) -> anyhow::Error {
        match self {
            Self::Recipe { .. }
            | Self::NoCache { .. }
            | Self::NoPlace
            | Self::FinalStates { .. }
            | Self::LastTokenStates { .. }
            | Self::OtherSamples { .. }
            | Self::Cache(
                CacheError::Mismatch { .. } | CacheError::BuildDiffers { .. } | CacheError::Leftover { .. },
            ) => UsageError(self.to_string()).into(),
            other => other.into(),
        }
    }
}
