//! The interfaces that the engine calls on a target model and on a drafter.

use deepspec_ops::DraftTree;
use tch::{Device, Tensor};

use crate::sampling::one_hot;
use crate::{SamplingBatch, TreeBudget};

/// Tokens to append to the KV caches of some slots.
pub struct ModelInput<'a> {
    /// (slot, number of tokens) in the order of the rows; a slot appears at most once.
    pub chunks: &'a [(usize, usize)],
    /// All tokens, chunk after chunk: `[N]` int64.
    pub tokens: Tensor,
}

/// The target's hidden states of the fed tokens, one row per token.
pub struct ModelOutput {
    /// Hidden states after the final norm `[N, d]`, the input of the LM head.
    pub hidden: Tensor,
    /// Captured raw layer outputs, concatenated in the order of the layer ids: `[N, m·d]`.
    pub captured_states: Tensor,
}

/// A causal language model with one KV cache per slot.
pub trait Target {
    /// Appends tokens to their slots' KV caches and returns the hidden states of exactly these
    /// tokens.
    fn forward(&mut self, input: &ModelInput) -> ModelOutput;
    /// Maps `hidden [R, d]` to float32 logits `[R, V]`.
    fn logits(&self, hidden: &Tensor) -> Tensor;
    /// Cuts the KV cache of `slot` to its first `len` tokens, which rolls rejected drafts back.
    /// After a cut to 0, data left in the cache must not affect the slot's next sequence.
    fn truncate(&mut self, slot: usize, len: usize);
    /// Maximum tokens of a forward that [`Target::truncate`] can cut off again, all or some of them; None without a
    /// limit. A cut to 0 is always possible. Recurrent states have a limit, because they cannot be cropped.
    fn max_rollback(&self) -> Option<usize> {
        None
    }
    /// Bytes of the KV cache of a sequence of up to `tokens` tokens.
    fn kv_cache_bytes(&self, _tokens: usize) -> u64 {
        0
    }
    /// Bytes of the attention masks of a tree of `rows` rows, at the end of a sequence of up to `tokens` tokens.
    fn tree_mask_bytes(&self, _rows: usize, _tokens: usize) -> u64 {
        0
    }
    /// Frees KV-cache memory that no sequence uses. The engine calls this after an out-of-memory
    /// error.
    fn free_cached_memory(&mut self) {}
    /// V, the number of logits.
    fn vocab_size(&self) -> usize;
    /// Device of the tensors.
    fn device(&self) -> Device;
    /// The target's verification of trees; None if it verifies chains only.
    fn as_tree_target(&mut self) -> Option<&mut dyn TreeTarget> {
        None
    }
}

/// A target that verifies trees.
pub trait TreeTarget {
    /// Appends one tree per chunk to the slots' KV caches, and returns the hidden states of exactly these rows. The tokens of chunk i are
    /// the anchor and the nodes of `trees[i]`. A row attends to the context and to its path, at the position of its depth.
    fn forward_trees(&mut self, input: &ModelInput, trees: &[DraftTree]) -> ModelOutput;
    /// Keeps only some rows of the tree that was appended to `slot` behind `past_len` tokens. The rows are runs (first row, number of
    /// rows) within the tree's chunk, and lie on one path. The sequence then ends behind them.
    fn keep_rows(&mut self, slot: usize, past_len: usize, runs: &[(i64, i64)]);
}

/// Lets an engine borrow its target from a caller that uses the target again later.
impl<T: Target> Target for &mut T {
    fn forward(&mut self, input: &ModelInput) -> ModelOutput {
        (**self).forward(input)
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        (**self).logits(hidden)
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        (**self).truncate(slot, len);
    }

    fn max_rollback(&self) -> Option<usize> {
        (**self).max_rollback()
    }

    fn kv_cache_bytes(&self, tokens: usize) -> u64 {
        (**self).kv_cache_bytes(tokens)
    }

    fn tree_mask_bytes(&self, rows: usize, tokens: usize) -> u64 {
        (**self).tree_mask_bytes(rows, tokens)
    }

    fn free_cached_memory(&mut self) {
        (**self).free_cached_memory();
    }

    fn vocab_size(&self) -> usize {
        (**self).vocab_size()
    }

    fn device(&self) -> Device {
        (**self).device()
    }

    fn as_tree_target(&mut self) -> Option<&mut dyn TreeTarget> {
        (**self).as_tree_target()
    }
}

/// Hidden states of the tokens committed since the drafter's last proposal.
pub struct Context {
    /// Captured hidden states, one row per token: `[C, m·d]`.
    pub captured_states: Tensor,
    /// Hidden states after the final norm `[C, d]`; None if the drafter does not read them.
    pub hidden: Option<Tensor>,
    /// Token of each row, `[C]` int64.
    pub tokens: Tensor,
    /// Committed token that follows each row's token, `[C]` int64. For a slot's last row it is the
    /// anchor.
    pub next: Tensor,
    /// (slot, number of rows) in row order.
    pub chunks: Vec<(usize, usize)>,
}

impl Context {
    /// Drops the rows of `slot`. Drops the rows of all slots if there is no memory to copy the
    /// remaining rows.
    pub(crate) fn drop_slot(&mut self, slot: usize) {
        let Some(at) = self.chunks.iter().position(|&(s, _)| s == slot) else { return };
        let first: usize = self.chunks[..at].iter().map(|&(_, rows)| rows).sum();
        let (_, count) = self.chunks.remove(at);
        let (first, end) = (first as i64, (first + count) as i64);
        let Self { captured_states, hidden, tokens, next, chunks } = self;
        for rows in [captured_states, tokens, next].into_iter().chain(hidden) {
            let behind = rows.narrow(0, end, rows.size()[0] - end);
            match Tensor::f_cat(&[rows.narrow(0, 0, first), behind], 0) {
                Ok(others) => *rows = others,
                Err(_) => return chunks.clear(),
            }
        }
    }
}

/// The input of a drafter that proposes a block for each of S slots.
#[derive(Clone, Copy)]
pub struct DraftRequest<'a> {
    /// Hidden states of the tokens committed since the last proposal.
    pub context: &'a Context,
    /// Slots to draft for.
    pub slots: &'a [usize],
    /// Last committed token of each slot, which the target has not run yet: `[S]` int64.
    pub anchors: &'a Tensor,
    /// Uniform random numbers for sampling the drafts: `[S, γ]` float64.
    pub uniforms: &'a Tensor,
    /// Sampling settings, one row per slot.
    pub sampling: &'a SamplingBatch,
}

/// Drafted blocks of S slots.
pub struct Proposal {
    /// Drafted tokens, `[S, γ]` int64.
    pub tokens: Tensor,
    /// Distributions that the tokens were drawn from, float32 `[S, γ, V]`. None if every token is
    /// the argmax (one-hot distributions).
    pub probs: Option<Tensor>,
    /// Logit of the probability that each token is accepted if all tokens before it were, `[S, γ]`.
    pub confidence: Option<Tensor>,
}

impl Proposal {
    /// Stacks the tokens `[S]` and distributions of consecutive positions, as [`SamplingBatch::sample`] returns them
    /// for one batch. Either every position has a distribution, or no position has one.
    ///
    /// # Panics
    /// If `draws` is empty.
    pub fn stack(draws: Vec<(Tensor, Option<Tensor>)>, confidence: Option<Tensor>) -> Self {
        let (tokens, probs): (Vec<Tensor>, Vec<Option<Tensor>>) = draws.into_iter().unzip();
        let probs = probs.into_iter().collect::<Option<Vec<Tensor>>>();
        Self {
            tokens: Tensor::stack(&tokens, 1),
            probs: probs.map(|probs| Tensor::stack(&probs, 1)),
            confidence,
        }
    }

    /// Distributions of the first `drafts` tokens over a vocabulary of V, one-hot if `probs` is
    /// None: float32 `[S, drafts, V]`.
    pub fn draft_probs(&self, drafts: i64, vocab: usize) -> Tensor {
        if let Some(probs) = &self.probs {
            return probs.narrow(1, 0, drafts);
        }
        one_hot(&self.tokens.narrow(1, 0, drafts), vocab as i64)
    }
}

/// A drafter with one context KV cache per slot.
pub trait Proposer {
    /// γ, the number of tokens per proposal.
    fn draft_len(&self) -> usize;
    /// Whether a block counts as ending at its first stop token. The tokens after a stop token are
    /// discarded in any case.
    fn ends_at_stop_tokens(&self) -> bool {
        false
    }
    /// Whether the drafter reads the hidden states after the final norm in addition to `captured_states`.
    fn reads_hidden(&self) -> bool;
    /// Appends the hidden states of newly committed tokens to the context, then drafts a block
    /// after each slot's anchor.
    fn propose(&mut self, request: &DraftRequest) -> Proposal;
    /// Why the drafter grows no trees, as a clause; None if it grows them.
    fn tree_refusal(&self) -> Option<&'static str> {
        Some("it drafts chains only")
    }
    /// Appends the context as [`Proposer::propose`] does, then grows a tree after each slot's anchor, of depth `max_depth` and γ at most.
    /// Trees do not depend on `request.uniforms`. A drafter with a [`Proposer::tree_refusal`] drafts nothing.
    fn propose_trees(
        &mut self,
        request: &DraftRequest,
        _budget: TreeBudget,
        _max_depth: usize,
    ) -> Vec<DraftTree> {
        vec![DraftTree::default(); request.slots.len()]
    }
    /// Cuts the slot's context to its first `len` tokens and discards unfinished drafts.
    fn truncate(&mut self, slot: usize, len: usize);
    /// Bytes of the context cache of a sequence of up to `tokens` tokens.
    fn kv_cache_bytes(&self, _tokens: usize) -> u64 {
        0
    }
    /// Frees KV-cache memory that no sequence uses. The engine calls this after an out-of-memory
    /// error.
    fn free_cached_memory(&mut self) {}
}

impl<P: Proposer + ?Sized> Proposer for Box<P> {
    fn draft_len(&self) -> usize {
        (**self).draft_len()
    }

    fn ends_at_stop_tokens(&self) -> bool {
        (**self).ends_at_stop_tokens()
    }

    fn reads_hidden(&self) -> bool {
        (**self).reads_hidden()
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        (**self).propose(request)
    }

    fn tree_refusal(&self) -> Option<&'static str> {
        (**self).tree_refusal()
    }

    fn propose_trees(
        &mut self,
        request: &DraftRequest,
        budget: TreeBudget,
        max_depth: usize,
    ) -> Vec<DraftTree> {
        (**self).propose_trees(request, budget, max_depth)
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        (**self).truncate(slot, len);
    }

    fn kv_cache_bytes(&self, tokens: usize) -> u64 {
        (**self).kv_cache_bytes(tokens)
    }

    fn free_cached_memory(&mut self) {
        (**self).free_cached_memory();
    }
}
