//! Everything that can go wrong with a cache, with the evidence.

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
    /// The kept last hidden states.
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
    /// The operating system refused something.
    #[error(transparent)]
    File(#[from] FileError),

    // Planning.
    /// There is nothing to cache.
    #[error("no samples to cache: the input has no row that survives truncation and the loss mask")]
    EmptyPlan,
    /// Rows would have no values, or more bytes than 64 bits count.
    #[error(
        "{taps} taps of {hidden_size} values and {rows} rows make no shard: each must be at least 1 and all fit 64 bits"
    )]
    BadLayout {
        /// Number of taps.
        taps: usize,
        /// Values per hidden state.
        hidden_size: usize,
        /// Rows of the shard or sample.
        rows: u64,
    },
    /// Shards of no bytes were asked for.
    #[error("a shard size of 0 bytes was asked for; give at least 1")]
    ZeroShardBytes,
    /// Two samples share an id.
    #[error("sample id {sample:?} occurs twice; ids must be unique")]
    DuplicateId {
        /// The id.
        sample: String,
    },
    /// A sample has no token, or more than a signed 32-bit number counts.
    #[error("sample {sample:?} has {length} tokens; expected 1 to {}", i32::MAX)]
    BadLength {
        /// Its id.
        sample: String,
        /// Its tokens.
        length: usize,
    },
    /// A supervised span is empty, out of order or past the end.
    #[error(
        "sample {sample:?}: supervised span {start}..{end} is not a non-empty span behind {after} and within {length} tokens"
    )]
    BadSpan {
        /// Its id.
        sample: String,
        /// First supervised token.
        start: u32,
        /// Behind the last supervised token.
        end: u32,
        /// End of the span before it.
        after: u32,
        /// Tokens of the sample.
        length: usize,
    },
    /// A token id outside the vocabulary.
    #[error(
        "sample {sample:?}: token id {token} at position {position} is outside the vocabulary of {vocab_size}"
    )]
    TokenOutside {
        /// Its id.
        sample: String,
        /// 0-based position.
        position: usize,
        /// The token id.
        token: i32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A sample is longer than the identity says samples are.
    #[error("sample {sample:?} has {length} tokens, past max_length {max_length}")]
    TooLong {
        /// Its id.
        sample: String,
        /// Its tokens.
        length: usize,
        /// The identity's limit.
        max_length: usize,
    },
    /// The plan's layout and the identity disagree.
    #[error("the plan and the identity disagree: {}", differences.join("; "))]
    PlanIdentity {
        /// The fields, with both values.
        differences: Vec<String>,
    },

    // Building.
    /// An unfinished or finished cache of something else is in the way.
    #[error("{} holds {} of something else: {}; give another folder, or --overwrite to discard it", dir.display(), if *finished { "a finished cache" } else { "an unfinished build" }, differences.join("; "))]
    BuildDiffers {
        /// The folder.
        dir: PathBuf,
        /// Whether it is a finished cache.
        finished: bool,
        /// The fields, with both values.
        differences: Vec<String>,
    },
    /// The folder holds cache files that belong to no build.
    #[error("{} is left over from a cache without a manifest; give another folder, or --overwrite to discard it", path.display())]
    Leftover {
        /// The first such file.
        path: PathBuf,
    },
    /// Another process builds here.
    #[error("another process is building in {}; wait for it or stop it", dir.display())]
    Locked {
        /// The worker's folder.
        dir: PathBuf,
    },
    /// A tensor handed to the writer has the wrong size.
    #[error("sample {sample:?}: {part} has {found} bytes, expected {expected}")]
    WrongSize {
        /// Its id.
        sample: String,
        /// The tensor.
        part: Part,
        /// Bytes given.
        found: usize,
        /// Bytes planned.
        expected: u64,
    },
    /// A hidden state is not a number.
    #[error(
        "sample {sample:?}: row {row} of {part} has the value {value}; the target's forward went wrong there (try float32, or drop the sample)"
    )]
    NotFinite {
        /// Its id.
        sample: String,
        /// The row within the sample's tensor: the token's position, or the index of the kept last state.
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
        /// Samples it holds.
        samples: usize,
    },
    /// The shard was finished too early.
    #[error("{}: finished after {found} of {expected} samples", path.display())]
    ShardShort {
        /// The shard.
        path: PathBuf,
        /// Samples written.
        found: usize,
        /// Samples planned.
        expected: usize,
    },
    /// Publishing was asked for before all shards are there.
    #[error("{}: {found} of {expected} shards are finished, shard {missing} is not; build it first", dir.display())]
    Unfinished {
        /// The cache's folder.
        dir: PathBuf,
        /// Finished shards.
        found: usize,
        /// Planned shards.
        expected: usize,
        /// The first that is missing.
        missing: usize,
    },
    /// There is nothing to merge.
    #[error("{}: nothing was built here; run `cache build --worker 0/n … --output-dir {}` first", dir.display(), dir.display())]
    NoParts {
        /// The cache's folder.
        dir: PathBuf,
    },
    /// A worker built something else than the others, or than its samples say.
    #[error("{} belongs to another build than its siblings: {}; remove it and run its worker again", part.display(), differences.join("; "))]
    PartDiffers {
        /// The worker's folder.
        part: PathBuf,
        /// The fields, with both values.
        differences: Vec<String>,
    },
    /// Workers have not finished.
    #[error("{}: {missing} of {expected} shards are not built yet; run the same `cache build` with {}, then merge again", dir.display(), workers.iter().map(|worker| format!("--worker {worker}")).collect::<Vec<_>>().join(", with "))]
    Incomplete {
        /// The cache's folder.
        dir: PathBuf,
        /// Shards that are missing.
        missing: usize,
        /// Shards of the plan.
        expected: usize,
        /// The workers that build them, as `i/n`.
        workers: Vec<String>,
    },
    /// A finished shard changed before it was published.
    #[error("{}: sha256 {found} instead of {expected}: the shard was changed after it was built; remove it and run its worker again", path.display())]
    PartDamaged {
        /// The shard.
        path: PathBuf,
        /// Digest of what is there.
        found: String,
        /// Digest that was recorded.
        expected: String,
    },

    // Reading.
    /// There is no manifest.
    #[error("{} is no finished cache: it has no manifest.json{}", dir.display(), if *unfinished { ", only an unfinished build; run the same `cache build` again" } else { "" })]
    NoManifest {
        /// The folder.
        dir: PathBuf,
        /// Whether a build was begun there.
        unfinished: bool,
    },
    /// A JSON file does not parse as what it should be.
    #[error("{}: {source}; restore it, or build the cache again with --overwrite", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// A manifest of another format or version.
    #[error("{}: this is {found}, expected {expected}; read it with the version that wrote it, or build it again", path.display())]
    Version {
        /// The manifest.
        path: PathBuf,
        /// Format and version found.
        found: String,
        /// Format and version that this code reads.
        expected: String,
    },
    /// The manifest's bytes are not the ones that were written.
    #[error("{}: digest {found} instead of {expected}: the manifest was changed after it was written; restore it or build the cache again", path.display())]
    ManifestChanged {
        /// The manifest.
        path: PathBuf,
        /// Digest of what is there.
        found: String,
        /// Digest it states.
        expected: String,
    },
    /// Numbers of the manifest contradict each other or the samples' table.
    #[error("{}: {field} is {found}, expected {expected}; build the cache again", path.display())]
    Inconsistent {
        /// The file with the lie.
        path: PathBuf,
        /// The field, with its row where it has one.
        field: String,
        /// What it says.
        found: String,
        /// What the rest implies.
        expected: String,
    },
    /// A file's bytes are not the ones that were written.
    #[error("{}: sha256 {found} instead of {expected}: the file was changed or damaged; restore it or build the cache again", path.display())]
    Digest {
        /// The file.
        path: PathBuf,
        /// Digest of what is there.
        found: String,
        /// Digest in the manifest.
        expected: String,
    },
    /// The samples' table does not parse.
    #[error("{}: {source}; restore it or build the cache again", path.display())]
    Parquet {
        /// The table.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: parquet::errors::ParquetError,
    },
    /// The samples' table has other columns.
    #[error("{}: column {found}, expected {expected}; this is no samples' table of this version", path.display())]
    Column {
        /// The table.
        path: PathBuf,
        /// Column and type found.
        found: String,
        /// Column and type expected.
        expected: String,
    },
    /// A file is truncated or has grown.
    #[error("{}: {found} bytes instead of {expected}: the file is truncated or damaged; restore it or build the cache again", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// Bytes there.
        found: u64,
        /// Bytes in the manifest.
        expected: u64,
    },
    /// A shard's header describes other tensors.
    #[error("{}: the header is {found:?}, expected {expected:?}: the shard is damaged or another one; restore it or build the cache again", path.display())]
    ShardHeader {
        /// The shard.
        path: PathBuf,
        /// Header found, cut short.
        found: String,
        /// Header that the manifest implies.
        expected: String,
    },
    /// A sample's bytes are not the ones that were written.
    #[error("{}: sample {sample:?} has checksum {found:08x} instead of {expected:08x}: its hidden states are damaged; restore the shard or build the cache again", path.display())]
    Checksum {
        /// The shard.
        path: PathBuf,
        /// The sample's id.
        sample: String,
        /// Checksum of what is there.
        found: u32,
        /// Checksum in the table.
        expected: u32,
    },
    /// A sample's compressed exponents are none, though its checksum is right.
    #[error("sample {sample:?}: its exponents cannot be read: {source}; restore the cache or build it again")]
    Exponents {
        /// The sample's id.
        sample: String,
        /// What zstd says.
        #[source]
        source: io::Error,
    },
    /// A cache of the reference's format 2 that cannot be imported, or one of ours that it cannot hold.
    #[error("{}: {problem}", path.display())]
    Reference {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong, what was expected and what to do.
        problem: String,
    },
    /// The cache has fewer samples.
    #[error("sample {index} was asked for, the cache has {len}")]
    NoSuchSample {
        /// Index asked for.
        index: usize,
        /// Samples there.
        len: usize,
    },
    /// The cache belongs to something else.
    #[error("{} was made for something else: {}; point to the matching cache or build it anew", dir.display(), differences.join("; "))]
    Mismatch {
        /// The cache.
        dir: PathBuf,
        /// The fields, with both values.
        differences: Vec<String>,
    },
}
