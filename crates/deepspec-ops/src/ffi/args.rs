//! Arguments and results of the kernels, which their references share.

use std::ops::Range;

use tch::Tensor;

/// Most rows of a call of the kernels for a few rows on a GPU. A row's bits depend on its own sequence alone.
pub const MAX_DECODE_ROWS: usize = 8;

/// One tensor's update: float32 and contiguous, of one shape and device.
pub struct AdamWTensors<'a> {
    /// What is learned.
    pub weights: &'a mut Tensor,
    /// Its gradient, which is divided in place, and on the CPU left zero.
    pub gradient: &'a mut Tensor,
    /// First moment.
    pub exp_avg: &'a mut Tensor,
    /// Second moment.
    pub exp_avg_sq: &'a mut Tensor,
}

/// The numbers of a step.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSettings {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Number of this step, from 1.
    pub step: f64,
}

/// Queries of neighbouring rows and the keys that they attend to.
pub struct AttentionPart {
    /// Rows of the queries, all blocks' one after the other.
    pub rows: Range<i64>,
    /// Keys of the context, not none.
    pub keys: Range<i64>,
    /// Added to the scores, `[1, 1, rows, keys]`; none where all keys are seen by all rows. What is hidden has a very low number
    /// instead of −∞, so that rows which see nothing of the part have a log-sum-exp.
    pub mask: Option<Tensor>,
}

/// Keys and values of a context or of blocks.
pub struct KeyValues<'a> {
    /// Keys.
    pub k: &'a Tensor,
    /// Values.
    pub v: &'a Tensor,
}

/// One sequence's part of what [`attend_by_block`] takes.
#[derive(Debug, Clone)]
pub struct SequenceBlocks {
    /// Tokens of its context.
    pub tokens: i64,
    /// The anchors of its blocks, which see the context before them.
    pub anchors: Vec<i64>,
}

/// How the blocks of a sequence are cut into tiles, on a GPU. Beside these numbers there is a tensor of others, int32, one list after the other: for each
/// tile the keys that all its blocks see and where those lie among all tiles' (`2 · tiles`); for each slot its block and that one's anchor
/// (`2 · tiles · slots`); the slot of each block (`blocks`); and three sums with a beginning of 0 (`3 · (tiles + 1)`): of the tiles' queries, of the keys that
/// they see, and of nothing.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TiledBlocks {
    /// Tiles.
    pub tiles: i64,
    /// Blocks of a tile.
    pub slots: i64,
    /// Positions of a block.
    pub size: i64,
    /// Heads of queries to a head of keys.
    pub repeats: i64,
    /// Heads of keys.
    pub groups: i64,
    /// D.
    pub dim: i64,
    /// Keys behind those that all blocks of a tile see.
    pub rest: i64,
    /// T, tokens of the context.
    pub tokens: i64,
    /// Blocks of the sequence.
    pub blocks: i64,
    /// Keys that tiles see, added up.
    pub packed: i64,
    /// The most that one sees.
    pub most_seen: i64,
    /// Of the scores.
    pub scale: f64,
}

/// One sequence's queries, and where its history is.
#[derive(Clone, Copy)]
pub struct KvChunk<'a> {
    /// Keys and values of the pool, `[rows, capacity, G, D]`.
    pub pool: [&'a Tensor; 2],
    /// The row of the pool.
    pub row: usize,
    /// Tokens before these.
    pub past_len: usize,
    /// Tokens of the chunk.
    pub len: usize,
    /// The first of its rows among the queries.
    pub first: usize,
}

/// Who sees what.
#[derive(Debug, Clone, Copy)]
pub struct KvWindow {
    /// Factor on the scores.
    pub scale: f64,
    /// Keys that a query sees; None for all before it.
    pub window: Option<usize>,
    /// Whether a query sees what comes behind it in its chunk.
    pub sees_chunk: bool,
}

/// Heads of queries, keys and values that lie side by side, and what is done to queries and keys before they attend.
#[derive(Clone, Copy)]
pub struct ProjectedHeads<'a> {
    /// H, heads of queries.
    pub query: i64,
    /// G, heads of keys.
    pub key_value: i64,
    /// D.
    pub dim: i64,
    /// Norms of queries and keys, `[D]`, of one ε.
    pub gains: Option<[RmsNormParams<'a>; 2]>,
    /// Cosines and sines of what each row is turned by, D/2 of each.
    pub angles: [&'a Tensor; 2],
}

/// Queries, keys and values of N rows.
#[derive(Clone, Copy)]
pub enum KvRows<'a> {
    /// Queries `[N, H, D]`, and keys and values `[N, G, D]`, already normed and rotated.
    Separate([&'a Tensor; 3]),
    /// One tensor `[N, (H + 2G)·D]` of queries, keys and values that are neither normed nor rotated.
    Projected(&'a Tensor, ProjectedHeads<'a>),
}

/// The weights `[d]` and ε of an RMS norm.
#[derive(Clone, Copy)]
pub struct RmsNormParams<'a> {
    /// Its weights.
    pub weights: &'a Tensor,
    /// Its ε.
    pub eps: f64,
}

/// What a target predicts for n rows of a drafter.
#[derive(Debug)]
pub struct TargetProbs {
    /// p^t, `[n, V]`, or of S sources `[S, V]`.
    pub probabilities: Tensor,
    /// −Σ p^t log p^t, `[n]` or `[S]` float64; 0 where it was not asked for.
    pub entropies: Tensor,
    /// Each row's source, `[n]` int64, where rows share them.
    pub source_of_row: Option<Tensor>,
}

/// How far n rows of logits of a drafter are from their labels x* and from a target; p^d and p^t are the probabilities. Distances are `[n, 1]` each.
pub struct RowsMeasured {
    /// −log p^d(x*).
    pub ce: Tensor,
    /// ‖p^d − p^t‖₁.
    pub l1: Tensor,
    /// Σ min(p^d, p^t).
    pub overlap: Tensor,
    /// −Σ p^t log p^d and Σ p^t log(p^t/p^d), where they were asked for. Rounding leaves the latter some 1e-7 beside 0, or below it, where both are equal.
    pub soft: Option<(Tensor, Tensor)>,
}

/// Logits of n rows of a drafter and of its target, in bfloat16 on a GPU.
pub struct LogitRows<'a> {
    /// The drafter's `[n, V]`, before a bias and a cap.
    pub base: &'a Tensor,
    /// What a Markov head adds, `[n, V]`.
    pub bias: Option<&'a Tensor>,
    /// The target's `[n, V]`, or of S sources `[S, V]`, before a cap.
    pub target: &'a Tensor,
    /// Each row's source, `[n]` int64, where rows share them.
    pub source_of_row: Option<&'a Tensor>,
    /// `[n]` int64.
    pub labels: &'a Tensor,
    /// c of `c · tanh(logit / c)`, which base and target are bent by.
    pub cap: Option<f64>,
}
