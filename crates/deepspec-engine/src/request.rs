//! What goes into the engine and what comes out of it.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Sampling;

/// One sequence to generate.
#[derive(Debug, Clone)]
pub struct Request {
    /// Names the sequence's randomness: with the sampling seed it decides every draw.
    pub id: String,
    /// Prompt token ids, not empty.
    pub prompt: Vec<i64>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Limit of generated tokens, at least 1.
    pub max_new_tokens: usize,
    /// Tokens that end the sequence; the one that does is part of the output.
    pub stop_ids: Vec<i64>,
}

/// Why a request cannot be taken, or cannot be finished.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum EngineError {
    /// A logit is NaN or infinite.
    #[error(
        "the target computed logits that are not finite; its weights are damaged or overflow this precision"
    )]
    NotFinite,
    /// There is nothing to continue.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// Zero tokens were asked for.
    #[error("max_new_tokens is 0; ask for at least 1 token")]
    NoTokens,
    /// Prompt and answer exceed the engine's context.
    #[error(
        "the prompt has {prompt} tokens and {max_new_tokens} may be generated, but the context holds {context}; shorten one of them"
    )]
    TooLong {
        /// Prompt tokens.
        prompt: usize,
        /// Requested limit.
        max_new_tokens: usize,
        /// Tokens a slot can hold.
        context: usize,
    },
    /// Prompt and answer exceed the memory that all sequences have together.
    #[error(
        "the keys and values of {tokens} tokens of prompt and answer take {} MB, but there are {} MB for those of all sequences; shorten the prompt or ask for fewer tokens",
        bytes.div_ceil(1 << 20), memory >> 20
    )]
    TooLarge {
        /// Tokens of the prompt, the answer and a drafted block.
        tokens: usize,
        /// Bytes that their history takes.
        bytes: u64,
        /// Bytes that there are.
        memory: u64,
    },
    /// Memory ran out while the sequence was running.
    #[error(
        "the memory ran out at a sequence of {tokens} tokens; ask again, or lower the number of slots ({words})"
    )]
    OutOfMemory {
        /// Tokens of its prompt and its answer so far.
        tokens: usize,
        /// The allocator's own words, one line of them.
        words: String,
    },
    /// A token id outside the vocabulary.
    #[error(
        "prompt token {token} is outside the target's vocabulary of {vocab}; is this the target's own tokenizer?"
    )]
    UnknownToken {
        /// The id found.
        token: i64,
        /// Vocabulary size.
        vocab: usize,
    },
}

/// Names a submitted request within one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(crate) u64);

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// A stop token was generated.
    Stop,
    /// The limit of new tokens was reached.
    Length,
}

/// One verification.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cycle {
    /// Drafted tokens that were verified, up to an accepted stop token.
    pub proposed: u32,
    /// Of these, the ones up to the first stop token drafted, whatever became of it: what stands behind it can be part of no
    /// answer.
    pub usable: u32,
    /// Drafted tokens that were accepted.
    pub accepted: u32,
    /// Tokens that the cycle committed.
    pub committed: u32,
    /// The drafter's confidence logits of the proposed tokens; empty without a confidence head.
    pub confidence: Vec<f32>,
}

impl Cycle {
    /// The confidence logits of the usable tokens: no drafter learns what stands behind a stop token, so that its confidence
    /// there says nothing.
    pub fn usable_confidence(&self) -> &[f32] {
        &self.confidence[..self.confidence.len().min(self.usable as usize)]
    }
}

/// A finished sequence.
#[derive(Debug, Clone)]
pub struct Completion {
    /// The request's id.
    pub id: String,
    /// Generated tokens, at most `max_new_tokens`, a final stop token included.
    pub tokens: Vec<i64>,
    /// Why it ended.
    pub finish: Finish,
    /// Its verifications, none when the first token already was a stop token.
    pub cycles: Vec<Cycle>,
}

/// Something that happened in a step.
#[derive(Debug)]
pub enum Event {
    /// New tokens of a sequence.
    Tokens(RequestId, Vec<i64>),
    /// A sequence ended; its tokens were reported before.
    Done(RequestId, Completion),
    /// A sequence cannot go on: [`EngineError::NotFinite`] or [`EngineError::OutOfMemory`]. The others do.
    Failed(RequestId, EngineError),
}

/// How the drafter chooses tokens. Answers follow the target's law either way; how much is accepted differs at temperatures above 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DraftSampling {
    /// Drawn from its distribution q as the sequence is sampled: a token is accepted with probability Σ min(p, q). vLLM's
    /// `draft_sample_method: probabilistic`.
    #[default]
    Probabilistic,
    /// The likeliest token: it is accepted with the target's probability of it, p(argmax q). llama.cpp's rule, and vLLM's unless told
    /// otherwise.
    Greedy,
}

impl DraftSampling {
    /// The rule that this is not.
    pub fn other(self) -> Self {
        match self {
            Self::Probabilistic => Self::Greedy,
            Self::Greedy => Self::Probabilistic,
        }
    }
}

impl fmt::Display for DraftSampling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Probabilistic => "drawn from the drafter's distribution",
            Self::Greedy => "the drafter's likeliest",
        })
    }
}

/// How the engine runs.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Sequences decoded at once.
    pub slots: usize,
    /// Tokens (prompt and answer) that one slot may hold.
    pub context: usize,
    /// Verifies at most this many drafted tokens per cycle.
    pub max_draft_tokens: Option<usize>,
    /// How drafted tokens are chosen.
    pub draft_sampling: DraftSampling,
    /// Runs one more cycle when exactly `max_new_tokens` are out, as the reference's loop does and counts.
    pub counts_overrun: bool,
}

/// Where wall-clock time went.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepTimes {
    /// Drafting.
    pub draft: Duration,
    /// The target's forwards, verification and the wait for its results.
    pub verify: Duration,
    /// Everything on the host.
    pub host: Duration,
    /// Steps taken.
    pub steps: u64,
}
