//! Arguments and results of the kernels. The reference implementations use the same types.

use std::ops::Range;

use tch::Tensor;

/// Maximum number of rows of a decoding step for the GPU kernels. A row's bits depend on its own sequence alone.
pub const MAX_DECODE_ROWS: usize = 8;

/// Tensors that an AdamW step of one parameter reads and writes. All are float32, contiguous, and of one shape and device.
pub struct AdamWTensors<'a> {
    /// The parameter.
    pub weights: &'a mut Tensor,
    /// Gradient of the parameter. The step divides it in place; on the CPU it is zero afterwards.
    pub gradient: &'a mut Tensor,
    /// First moment.
    pub exp_avg: &'a mut Tensor,
    /// Second moment.
    pub exp_avg_sq: &'a mut Tensor,
}

/// Hyperparameters of an AdamW step.
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

/// A range of query rows, and a range of context keys that they attend to.
pub struct AttentionPart {
    /// Rows of the queries; blocks follow each other.
    pub rows: Range<i64>,
    /// Keys of the context; at least one.
    pub keys: Range<i64>,
    /// Additive mask of the scores, `[1, 1, rows, keys]`; None if all rows see all keys. Masked scores get a very low number
    /// instead of −∞, so that rows without visible keys have a finite log-sum-exp.
    pub mask: Option<Tensor>,
}

/// Which keys the rows of draft blocks see.
pub struct BlockMasks<'a> {
    /// Context keys that rows see.
    pub parts: &'a [AttentionPart],
    /// Additive mask of the scores within a block, `[1, 1, r, B]`; None if all slots of a block see each other.
    pub own: Option<&'a Tensor>,
}

/// Keys and values of a context or of blocks.
pub struct KeyValues<'a> {
    /// Keys.
    pub k: &'a Tensor,
    /// Values.
    pub v: &'a Tensor,
}

/// Context length and anchors of one sequence, for `attend_by_block`.
#[derive(Debug, Clone)]
pub struct SequenceBlocks {
    /// Tokens of its context.
    pub tokens: i64,
    /// Anchor of each block; a block sees the context before its anchor.
    pub anchors: Vec<i64>,
}

/// Sizes of the tiles of a sequence's blocks, for the attention on a GPU.
///
/// An int32 tensor of indices goes with them. Its lists follow each other:
/// - `2 · tiles`: the number of keys that all blocks of each tile see, and their offset among the keys of all tiles;
/// - `2 · tiles · slots`: the block of each slot, and that block's anchor;
/// - `blocks`: the slot of each block;
/// - `3 · (tiles + 1)`: running sums from 0 of the tiles' queries, of their keys, and of zeros.
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
    /// Maximum, over the tiles, of the number of keys that only some blocks of a tile see, rounded up. They follow the keys that all blocks
    /// of the tile see.
    pub rest: i64,
    /// T, tokens of the context.
    pub tokens: i64,
    /// Blocks of the sequence.
    pub blocks: i64,
    /// Sum of the keys that all blocks of each tile see.
    pub packed: i64,
    /// Maximum, over the tiles, of the number of keys that all blocks of a tile see.
    pub most_seen: i64,
    /// Factor on the scores.
    pub scale: f64,
}

/// Queries of one sequence, and the place of its keys and values in the KV cache.
#[derive(Clone, Copy)]
pub struct KvChunk<'a> {
    /// Keys and values of the pool, `[rows, capacity, G, D]`.
    pub pool: [&'a Tensor; 2],
    /// The row of the pool.
    pub row: usize,
    /// Number of tokens in the KV cache before the chunk.
    pub past_len: usize,
    /// Tokens of the chunk.
    pub len: usize,
    /// The first of its rows among the queries.
    pub first: usize,
}

/// Keys that a query attends to.
#[derive(Debug, Clone, Copy)]
pub struct KvWindow {
    /// Factor on the scores.
    pub scale: f64,
    /// Keys that a query sees; None for all before it.
    pub window: Option<usize>,
    /// Whether a query sees later tokens of its chunk.
    pub sees_chunk: bool,
}

/// Numbers of heads in a fused QKV projection, and the norms and the rotation to apply to queries and keys.
#[derive(Clone, Copy)]
pub struct ProjectedHeads<'a> {
    /// H, heads of queries.
    pub query: i64,
    /// G, heads of keys.
    pub key_value: i64,
    /// D, head dim.
    pub dim: i64,
    /// Norms of query heads and key heads, weights `[D]`, with equal ε.
    pub gains: Option<[RmsNormParams<'a>; 2]>,
    /// Cosines and sines of each row's rotation, D/2 of each.
    pub angles: [&'a Tensor; 2],
}

/// Queries, keys and values of N rows, in one of two forms.
#[derive(Clone, Copy)]
pub enum QkvInput<'a> {
    /// Queries `[N, H, D]`, and keys and values `[N, G, D]`, already normed and rotated.
    Separate([&'a Tensor; 3]),
    /// One tensor `[N, (H + 2G)·D]` of queries, keys and values that are neither normed nor rotated.
    Fused(&'a Tensor, ProjectedHeads<'a>),
}

/// The weights `[d]` and ε of an RMS norm.
#[derive(Clone, Copy)]
pub struct RmsNormParams<'a> {
    /// Weights `[d]`.
    pub weights: &'a Tensor,
    /// ε, added to the mean square.
    pub eps: f64,
}

/// Target distributions for n rows of a drafter.
#[derive(Debug)]
pub struct TargetProbs {
    /// p^t, `[n, V]`, or `[S, V]` if rows share S target states.
    pub probabilities: Tensor,
    /// −Σ p^t log p^t, `[n]` or `[S]` float64; 0 if it was not requested.
    pub entropies: Tensor,
    /// Index of each row's target state, `[n]` int64, if rows share them.
    pub source_of_row: Option<Tensor>,
}

/// Losses of n rows of drafter logits, `[n, 1]` each, with label x*, drafter p^d and target p^t.
pub struct RowDistances {
    /// −log p^d(x*).
    pub ce: Tensor,
    /// ‖p^d − p^t‖₁.
    pub l1: Tensor,
    /// Σ min(p^d, p^t).
    pub overlap: Tensor,
    /// −Σ p^t log p^d and Σ p^t log(p^t/p^d), if they were requested. For equal distributions the KL divergence is within about 1e-7 of 0,
    /// and rounding may make it negative.
    pub soft: Option<(Tensor, Tensor)>,
}

/// Logits of n rows of a drafter and of its target, in bfloat16 on a GPU.
pub struct LogitRows<'a> {
    /// The drafter's `[n, V]`, before a bias and a cap.
    pub base: &'a Tensor,
    /// Bias of the logits, `[n, V]`.
    pub bias: Option<&'a Tensor>,
    /// The target's `[n, V]`, or `[S, V]` if rows share S target states, before a cap.
    pub target: &'a Tensor,
    /// Index of each row's target state, `[n]` int64, if rows share them.
    pub source_of_row: Option<&'a Tensor>,
    /// Label tokens, `[n]` int64.
    pub labels: &'a Tensor,
    /// c of the soft-cap `c · tanh(logit / c)` on base and target.
    pub cap: Option<f64>,
}
