//! The interfaces that the engine calls on a target model and on a drafter.

use tch::{Device, Tensor};

use crate::SamplingBatch;
use crate::sampling::one_hot;

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
    /// Bytes of the KV cache of a sequence of up to `tokens` tokens.
    fn kv_cache_bytes(&self, _tokens: usize) -> u64 {
        0
    }
    /// Frees KV-cache memory that no sequence uses. The engine calls this after an out-of-memory
    /// error.
    fn free_cached_memory(&mut self) {}
    /// V, the number of logits.
    fn vocab_size(&self) -> usize;
    /// Device of the tensors.
    fn device(&self) -> Device;
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

    fn kv_cache_bytes(&self, tokens: usize) -> u64 {
        (**self).kv_cache_bytes(tokens)
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
