//! The files of a cache, and the folder of unfinished builds.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The folder of unfinished builds in `dir`.
pub(crate) fn parts_dir(dir: &Path) -> PathBuf {
    dir.join("parts")
}

/// Sums over all samples.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheTotals {
    /// Number of samples.
    pub samples: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of supervised tokens.
    pub supervised_tokens: u64,
}

/// Manifest entry of the samples' table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplesEntry {
    /// File name.
    pub file: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Digest of the file.
    pub sha256: String,
}

/// Manifest entry of a shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// File name.
    pub file: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Rows of `taps`: tokens.
    pub rows: u64,
    /// Rows of `last`: stored final hidden states.
    pub last_rows: u64,
    /// Digest of the file.
    pub sha256: String,
}
