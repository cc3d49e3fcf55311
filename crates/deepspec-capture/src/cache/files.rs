//! What a cache consists of: its files, and where unfinished ones lie.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The folder of unfinished builds in `dir`.
pub(crate) fn parts_dir(dir: &Path) -> PathBuf {
    dir.join("parts")
}

/// Sums over all samples.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// Samples.
    pub samples: u64,
    /// Tokens.
    pub tokens: u64,
    /// Supervised tokens.
    pub supervised_tokens: u64,
}

/// The samples' table.
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

/// One shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// File name.
    pub file: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Rows of `taps`: tokens.
    pub rows: u64,
    /// Rows of `last`: kept positions.
    pub last_rows: u64,
    /// Digest of the file.
    pub sha256: String,
}
