//! Why there are no states.

use std::path::PathBuf;

use crate::cache::CacheError;
use deepspec_core::FinalStates;
use deepspec_core::atomic::FileError;
use deepspec_core::cli::UsageError;
use deepspec_hub::HubError;
use deepspec_models::ModelError;
use deepspec_text::TextError;

/// A recipe, input or target from which no states can be made. Every message is one line.
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
    /// The folder for tokenised samples does not take them.
    #[error("{0}; tokenised samples want a folder with room: let DEEPSPEC_CACHE name one")]
    Unwritable(#[source] FileError),
    /// A file of tokenised samples that was just written cannot be used.
    #[error("{}: {problem}", path.display())]
    Samples {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A value of the recipe does not fit the target.
    #[error("`{key}`: {problem}")]
    Recipe {
        /// Dotted path of the key.
        key: &'static str,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// There is no folder at all.
    #[error("{}: no such cache; build it with `deepspec-data cache build --config … --output-dir {}`", dir.display(), dir.display())]
    NoCache {
        /// Where it was looked for.
        dir: PathBuf,
    },
    /// A cache lacks final states that the drafter learns from.
    #[error("{}: this cache keeps the last states of {kept} positions, and the drafter learns from those of {needed}; build one with `deepspec-data cache build --last {needed}`", dir.display())]
    FinalStates {
        /// The cache.
        dir: PathBuf,
        /// What it keeps.
        kept: FinalStates,
        /// What is needed.
        needed: FinalStates,
    },
    /// A cache that is finished already has not the samples of the input.
    #[error("{}: this cache has no sample {sample:?} as data.input gives it; name another folder, or the files that it was made from", dir.display())]
    OtherSamples {
        /// The cache.
        dir: PathBuf,
        /// Id of the first sample that is missing or other than the input's.
        sample: String,
    },
}

impl StatesError {
    /// The error of opening a recipe's source for a program's `main`, which exits with 2: what a recipe says or points
    /// to is the caller's to put right, unless the hub or the way to it is out of order.
    pub fn report(self) -> anyhow::Error {
        match self {
            Self::Hub(error) => error.report(),
            other => UsageError(other.to_string()).into(),
        }
    }

    /// The error of opening a data set for a program's `main`: exit code 2 where the recipe and what it names do not
    /// belong together, 1 where something is damaged or out of order.
    pub fn report_data(self) -> anyhow::Error {
        match self {
            Self::Recipe { .. }
            | Self::NoCache { .. }
            | Self::NoPlace
            | Self::FinalStates { .. }
            | Self::OtherSamples { .. }
            | Self::Cache(
                CacheError::Mismatch { .. } | CacheError::BuildDiffers { .. } | CacheError::Leftover { .. },
            ) => UsageError(self.to_string()).into(),
            other => other.into(),
        }
    }
}
