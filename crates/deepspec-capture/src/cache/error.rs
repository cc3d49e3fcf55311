//! Errors of caches, with the values found and expected.

use std::fmt;
use std::io;
use std::path::PathBuf;

use deepspec_core::atomic::FileError;

use deepspec_core::Tap;

/// A tensor of a sample, for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The hidden states of all taps.
    Taps,
    /// The hidden states of one tap.
    Tap(Tap),
    /// The stored final hidden states.
    Last,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taps => f.write_str("taps"),
            Self::Tap(tap) => write!(f, "tap {tap}"),
            Self::Last => f.write_str("last hidden state"),
        }
    }
}

/// Why a cache cannot be planned, built or read. Every message is one line.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// A failed system call.
    #[error(transparent)]
    File(#[from] FileError),

    // Planning.
    /// The input has no usable sample.
    #[error("no samples to cache: the input has no row that survives truncation and the loss mask")]
    EmptyPlan,
    /// Rows without values, or sizes beyond 64 bits.
    #[error(
        "{taps} taps of {hidden_size} values and {rows} rows make no shard: values and rows must be at least 1, and all fit 64 bits"
    )]
    BadLayout {
        /// Number of taps.
        taps: usize,
        /// Values per hidden state.
        hidden_size: usize,
        /// Rows of the shard or sample.
        rows: u64,
    },
    /// A shard size of 0 bytes was requested.
    #[error("a shard size of 0 bytes was asked for; give at least 1")]
    ZeroShardBytes,
    /// Two samples share an id.
    #[error("sample id {sample:?} occurs twice; ids must be unique")]
    DuplicateId {
        /// The id.
        sample: String,
    },
    /// A sample has no tokens, or more than 2³¹ - 1.
    #[error("sample {sample:?} has {length} tokens; expected 1 to {}", i32::MAX)]
    BadLength {
        /// Id of the sample.
        sample: String,
        /// Number of tokens.
        length: usize,
    },
    /// A supervised span is empty, out of order, or beyond the end.
    #[error(
        "sample {sample:?}: supervised span {start}..{end} is not a non-empty span behind {after} and within {length} tokens"
    )]
    BadSpan {
        /// Id of the sample.
        sample: String,
        /// First supervised token.
        start: u32,
        /// End of the span, exclusive.
        end: u32,
        /// End of the previous span.
        after: u32,
        /// Number of tokens in the sample.
        length: usize,
    },
    /// A token id outside the vocabulary.
    #[error(
        "sample {sample:?}: token id {token} at position {position} is outside the vocabulary of {vocab_size}"
    )]
    TokenOutside {
        /// Id of the sample.
        sample: String,
        /// 0-based position.
        position: usize,
        /// The token id.
        token: i32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A sample is longer than `max_length` of the identity.
    #[error("sample {sample:?} has {length} tokens, past max_length {max_length}")]
    TooLong {
        /// Id of the sample.
        sample: String,
        /// Number of tokens.
        length: usize,
        /// Limit of the identity.
        max_length: usize,
    },
    /// The plan's layout and the identity disagree.
    #[error("the plan and the identity disagree: {}", differences.join("; "))]
    PlanIdentity {
        /// The fields, with both values.
        differences: Vec<String>,
    },

    // Building.
    /// The folder has an unfinished or finished cache of other content.
    #[error("{} holds {} of something else: {}; give another folder, or --overwrite to discard it", dir.display(), if *finished { "a finished cache" } else { "an unfinished build" }, differences.join("; "))]
    BuildDiffers {
        /// The folder.
        dir: PathBuf,
        /// Whether that cache is finished.
        finished: bool,
        /// The fields, with both values.
        differences: Vec<String>,
    },
    /// The folder has cache files without a manifest or a build.
    #[error("{} is left over from a cache without a manifest; give another folder, or --overwrite to discard it", path.display())]
    Leftover {
        /// The first such file.
        path: PathBuf,
    },
    /// Another process is building in the folder.
    #[error("another process is building in {}; wait for it or stop it", dir.display())]
    Locked {
        /// The worker's folder.
        dir: PathBuf,
    },
    /// A tensor handed to the writer has the wrong size.
    #[error("sample {sample:?}: {part} has {found} bytes, expected {expected}")]
    WrongSize {
        /// Id of the sample.
        sample: String,
        /// The tensor.
        part: Part,
        /// Bytes passed.
        found: usize,
        /// Bytes expected by the plan.
        expected: u64,
    },
    /// A hidden state has a NaN or infinity.
    #[error(
        "sample {sample:?}: row {row} of {part} has the value {value}; the target's forward went wrong there (try float32, or drop the sample)"
    )]
    NotFinite {
        /// Id of the sample.
        sample: String,
        /// Row of the sample's tensor: the token's position, or the index of the stored final
        /// hidden state.
        row: usize,
        /// The tensor.
        part: Part,
        /// NaN or an infinity.
        value: f32,
    },
    /// More samples were pushed than the shard holds.
    #[error("{}: all {samples} samples of this shard are written; finish it", path.display())]
    ShardFull {
        /// The shard.
        path: PathBuf,
        /// Number of samples in the shard.
        samples: usize,
    },
    /// The shard was finished before all its samples were pushed.
    #[error("{}: finished after {found} of {expected} samples", path.display())]
    ShardShort {
        /// The shard.
        path: PathBuf,
        /// Number of samples written.
        found: usize,
        /// Number of samples planned.
        expected: usize,
    },
    /// Publishing was requested before all shards were finished.
    #[error("{}: {found} of {expected} shards are finished, shard {missing} is not; build it first", dir.display())]
    Unfinished {
        /// The cache's folder.
        dir: PathBuf,
        /// Number of finished shards.
        found: usize,
        /// Number of planned shards.
        expected: usize,
        /// The first missing shard.
        missing: usize,
    },
    /// There are no workers' folders to merge.
    #[error("{}: nothing was built here; run `cache build --worker 0/n … --output-dir {}` first", dir.display(), dir.display())]
    NoParts {
        /// The cache's folder.
        dir: PathBuf,
    },
    /// A worker's build differs from that of the others, or from its own samples.
    #[error("{} belongs to another build than its siblings: {}; remove it and run its worker again", part.display(), differences.join("; "))]
    PartDiffers {
        /// The worker's folder.
        part: PathBuf,
        /// The fields, with both values.
        differences: Vec<String>,
    },
    /// Some workers have not finished.
    #[error("{}: {missing} of {expected} shards are not built yet; run the same `cache build` with {}, then merge again", dir.display(), workers.iter().map(|worker| format!("--worker {worker}")).collect::<Vec<_>>().join(", with "))]
    Incomplete {
        /// The cache's folder.
        dir: PathBuf,
        /// Number of missing shards.
        missing: usize,
        /// Number of shards in the plan.
        expected: usize,
        /// The workers that build the missing shards, as `i/n`.
        workers: Vec<String>,
    },
    /// A finished shard was changed before it was published.
    #[error("{}: sha256 {found} instead of {expected}: the shard was changed after it was built; remove it and run its worker again", path.display())]
    PartDamaged {
        /// The shard.
        path: PathBuf,
        /// Digest of the file.
        found: String,
        /// Recorded digest.
        expected: String,
    },

    // Reading.
    /// The folder has no manifest.
    #[error("{} is no finished cache: it has no manifest.json{}", dir.display(), if *unfinished { ", only an unfinished build; run the same `cache build` again" } else { "" })]
    NoManifest {
        /// The folder.
        dir: PathBuf,
        /// Whether the folder has an unfinished build.
        unfinished: bool,
    },
    /// A JSON file has invalid content.
    #[error("{}: {source}; restore it, or build the cache again with --overwrite", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The position and the reason.
        #[source]
        source: serde_json::Error,
    },
    /// The manifest has another format or version.
    #[error("{}: this is {found}, expected {expected}; read it with the version that wrote it, or build it again", path.display())]
    Version {
        /// The manifest.
        path: PathBuf,
        /// Format and version found.
        found: String,
        /// Format and version that this code reads.
        expected: String,
    },
    /// The manifest was changed after it was written.
    #[error("{}: digest {found} instead of {expected}: the manifest was changed after it was written; restore it or build the cache again", path.display())]
    ManifestChanged {
        /// The manifest.
        path: PathBuf,
        /// Digest of the file.
        found: String,
        /// Digest stated in the manifest.
        expected: String,
    },
    /// Numbers of the manifest contradict each other or the samples' table.
    #[error("{}: {field} is {found}, expected {expected}; build the cache again", path.display())]
    Inconsistent {
        /// The file with the wrong number.
        path: PathBuf,
        /// The field, with its row if there is one.
        field: String,
        /// Value found.
        found: String,
        /// Value implied by the other fields.
        expected: String,
    },
    /// A file was changed after it was written.
    #[error("{}: sha256 {found} instead of {expected}: the file was changed or damaged; restore it or build the cache again", path.display())]
    Digest {
        /// The file.
        path: PathBuf,
        /// Digest of the file.
        found: String,
        /// Digest in the manifest.
        expected: String,
    },
    /// The samples' table does not parse.
    #[error("{}: {source}; restore it or build the cache again", path.display())]
    Parquet {
        /// Path of the table.
        path: PathBuf,
        /// The position and the reason.
        #[source]
        source: parquet::errors::ParquetError,
    },
    /// The samples' table has unexpected columns.
    #[error("{}: column {found}, expected {expected}; this is no samples' table of this version", path.display())]
    Column {
        /// Path of the table.
        path: PathBuf,
        /// Column and type found.
        found: String,
        /// Column and type expected.
        expected: String,
    },
    /// A file is truncated or longer than recorded.
    #[error("{}: {found} bytes instead of {expected}: the file is truncated or damaged; restore it or build the cache again", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// Size of the file in bytes.
        found: u64,
        /// Size in the manifest.
        expected: u64,
    },
    /// A shard's header describes unexpected tensors.
    #[error("{}: the header is {found:?}, expected {expected:?}: the shard is damaged or another one; restore it or build the cache again", path.display())]
    ShardHeader {
        /// The shard.
        path: PathBuf,
        /// Header found, truncated.
        found: String,
        /// Header expected from the manifest.
        expected: String,
    },
    /// A sample's bytes were changed after they were written.
    #[error("{}: sample {sample:?} has checksum {found:08x} instead of {expected:08x}: its hidden states are damaged; restore the shard or build the cache again", path.display())]
    Checksum {
        /// The shard.
        path: PathBuf,
        /// The sample's id.
        sample: String,
        /// Checksum of the bytes.
        found: u32,
        /// Checksum in the samples' table.
        expected: u32,
    },
    /// A sample's compressed exponents are invalid although its checksum matches.
    #[error("sample {sample:?}: its exponents cannot be read: {source}; restore the cache or build it again")]
    Exponents {
        /// The sample's id.
        sample: String,
        /// Error of zstd.
        #[source]
        source: io::Error,
    },
    /// A format 2 cache that cannot be imported, or a cache that format 2 cannot represent.
    #[error("{}: {problem}", path.display())]
    Reference {
        /// The file or folder.
        path: PathBuf,
        /// The problem, the expected value and the remedy.
        problem: String,
    },
    /// The sample index is out of range.
    #[error("sample {index} was asked for, the cache has {len}")]
    NoSuchSample {
        /// The requested index.
        index: usize,
        /// Number of samples in the cache.
        len: usize,
    },
    /// The cache was made for another target or with other settings.
    #[error("{} was made for something else: {}; point to the matching cache or build it anew", dir.display(), differences.join("; "))]
    Mismatch {
        /// The cache.
        dir: PathBuf,
        /// The fields, with both values.
        differences: Vec<String>,
    },
}
