//! What the engine needs from a target and from a drafter.

use tch::{Device, Tensor};

use crate::SamplingBatch;
use crate::sampling::one_hot;

/// Tokens appended to the histories of some slots.
pub struct ModelInput<'a> {
    /// (slot, number of tokens) in the order of the rows; a slot appears at most once.
    pub chunks: &'a [(usize, usize)],
    /// All tokens, chunk after chunk: `[N]` int64.
    pub tokens: Tensor,
}

/// What the target computed for the fed tokens, row by row.
pub struct ModelOutput {
    /// Final-normed hidden states `[N, d]`, the input of the head.
    pub hidden: Tensor,
    /// Captured raw layer outputs, concatenated in order of the layer ids: `[N, m·d]`.
    pub taps: Tensor,
}

/// A causal language model with one key/value history per slot.
pub trait Target {
    /// Appends tokens to their slots' histories and returns the states of exactly these tokens.
    fn forward(&mut self, feed: &ModelInput) -> ModelOutput;
    /// `hidden [R, d]` to float32 logits `[R, V]`.
    fn logits(&self, hidden: &Tensor) -> Tensor;
    /// Forgets everything of `slot` past `len`: how a rejected tail is rolled back. What is left of a history of length 0 has no effect
    /// on the next one, whatever it was.
    fn truncate(&mut self, slot: usize, len: usize);
    /// Bytes that the history of a sequence of up to `tokens` takes.
    fn history_bytes(&self, _tokens: usize) -> u64 {
        0
    }
    /// Gives back memory that is kept for later sequences, because there is none left.
    fn release(&mut self) {}
    /// V, the number of logits.
    fn vocab_size(&self) -> usize;
    /// Where the tensors live.
    fn device(&self) -> Device;
}

/// An engine may borrow its target from whoever needs it again.
impl<T: Target> Target for &mut T {
    fn forward(&mut self, feed: &ModelInput) -> ModelOutput {
        (**self).forward(feed)
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        (**self).logits(hidden)
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        (**self).truncate(slot, len);
    }

    fn history_bytes(&self, tokens: usize) -> u64 {
        (**self).history_bytes(tokens)
    }

    fn release(&mut self) {
        (**self).release();
    }

    fn vocab_size(&self) -> usize {
        (**self).vocab_size()
    }

    fn device(&self) -> Device {
        (**self).device()
    }
}

/// States of tokens that were committed since the drafter's last proposal.
pub struct Context {
    /// Captured states, one row per token: `[C, m·d]`.
    pub taps: Tensor,
    /// Final-normed states `[C, d]`, where the drafter reads them and there are any.
    pub hidden: Option<Tensor>,
    /// The tokens themselves, `[C]` int64.
    pub tokens: Tensor,
    /// The committed token behind each of them, `[C]` int64; behind a slot's last row stands its anchor.
    pub next: Tensor,
    /// (slot, number of rows) in row order.
    pub chunks: Vec<(usize, usize)>,
}

impl Context {
    /// Drops the rows of `slot`. Where there is no memory to keep the others' apart from them, those go as well.
    pub(crate) fn forget(&mut self, slot: usize) {
        let Some(at) = self.chunks.iter().position(|&(s, _)| s == slot) else { return };
        let first: usize = self.chunks[..at].iter().map(|&(_, rows)| rows).sum();
        let (_, count) = self.chunks.remove(at);
        let (first, end) = (first as i64, (first + count) as i64);
        let Self { taps, hidden, tokens, next, chunks } = self;
        for rows in [taps, tokens, next].into_iter().chain(hidden) {
            let behind = rows.narrow(0, end, rows.size()[0] - end);
            match Tensor::f_cat(&[rows.narrow(0, 0, first), behind], 0) {
                Ok(others) => *rows = others,
                Err(_) => return chunks.clear(),
            }
        }
    }
}

/// What a drafter is asked for: a block for each of S slots.
#[derive(Clone, Copy)]
pub struct DraftRequest<'a> {
    /// States of what was committed since its last proposal.
    pub context: &'a Context,
    /// The slots.
    pub slots: &'a [usize],
    /// Their last committed tokens, which the target has not run over yet: `[S]` int64.
    pub anchors: &'a Tensor,
    /// Decide the draws: `[S, γ]` float64.
    pub uniforms: &'a Tensor,
    /// One row per slot.
    pub sampling: &'a SamplingBatch,
}

/// Drafted blocks for S slots.
pub struct Proposal {
    /// `[S, γ]` int64.
    pub tokens: Tensor,
    /// The distributions the tokens were drawn from, float32 `[S, γ, V]`; None where the drafter was sure of all of them.
    pub probs: Option<Tensor>,
    /// Logit of the probability that each token is accepted given that its predecessors were, `[S, γ]`.
    pub confidence: Option<Tensor>,
}

impl Proposal {
    /// Of tokens `[S]` and their distributions, one after the other, as [`SamplingBatch::sample`] gives them of one batch: all with distributions, or none.
    ///
    /// # Panics
    /// If there are no tokens.
    pub fn of(draws: Vec<(Tensor, Option<Tensor>)>, confidence: Option<Tensor>) -> Self {
        let (tokens, probs): (Vec<Tensor>, Vec<Option<Tensor>>) = draws.into_iter().unzip();
        let probs = probs.into_iter().collect::<Option<Vec<Tensor>>>();
        Self {
            tokens: Tensor::stack(&tokens, 1),
            probs: probs.map(|probs| Tensor::stack(&probs, 1)),
            confidence,
        }
    }

    /// The distributions of the first `drafts` tokens over a vocabulary of V, those of sure ones too: float32 `[S, drafts, V]`.
    pub fn distributions(&self, drafts: i64, vocab: usize) -> Tensor {
        if let Some(probs) = &self.probs {
            return probs.narrow(1, 0, drafts);
        }
        one_hot(&self.tokens.narrow(1, 0, drafts), vocab as i64)
    }
}

/// A drafter with one context history per slot.
pub trait Proposer {
    /// γ, the number of tokens per proposal.
    fn draft_len(&self) -> usize;
    /// Whether a block is said to end with the first stop token in it. The tail behind one is thrown away in any case.
    fn ends_at_stop_tokens(&self) -> bool {
        false
    }
    /// Whether it reads the final-normed states of what was committed, beside the taps.
    fn reads_hidden(&self) -> bool;
    /// Takes in the states of newly committed tokens, then drafts a block after each slot's anchor.
    fn propose(&mut self, request: &DraftRequest) -> Proposal;
    /// Forgets the slot's context past its first `len` tokens, and whatever was being drafted.
    fn truncate(&mut self, slot: usize, len: usize);
    /// Bytes that the context of a sequence of up to `tokens` takes.
    fn history_bytes(&self, _tokens: usize) -> u64 {
        0
    }
    /// Gives back memory that is kept for later sequences, because there is none left.
    fn release(&mut self) {}
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

    fn history_bytes(&self, tokens: usize) -> u64 {
        (**self).history_bytes(tokens)
    }

    fn release(&mut self) {
        (**self).release();
    }
}
