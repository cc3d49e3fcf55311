//! Requests to the engine, and its events, completions and errors.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Sampling, TreeBudget};

/// One sequence to generate.
#[derive(Debug, Clone)]
pub struct Request {
    /// Name of the sequence. Together with the sampling seed it determines every random draw.
    pub id: String,
    /// Prompt token ids, not empty.
    pub prompt: Vec<i64>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Limit of generated tokens, at least 1.
    pub max_new_tokens: usize,
    /// Tokens that end the sequence; the output includes the stop token.
    pub stop_ids: Vec<i64>,
}

/// Why the engine refuses a request or cannot finish it.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum EngineError {
    /// A logit is NaN or infinite.
    #[error(
        "the target computed logits that are not finite; its weights are damaged or overflow this precision"
    )]
    NotFinite,
    /// The prompt has no tokens.
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
        /// Tokens that fit into a slot.
        context: usize,
    },
    /// Prompt and answer exceed the memory of all sequences.
    #[error(
        "the cache of {tokens} tokens of prompt and answer takes {} MB, but there are {} MB for all sequences; shorten the prompt or ask for fewer tokens",
        bytes.div_ceil(1 << 20), memory >> 20
    )]
    TooLarge {
        /// Tokens of the prompt, the answer and a drafted block.
        tokens: usize,
        /// Bytes of the KV cache, recurrent states and tree masks that the request needs.
        bytes: u64,
        /// Bytes available.
        memory: u64,
    },
    /// Memory ran out while the sequence was running.
    #[error(
        "the memory ran out at a sequence of {tokens} tokens; ask again, or lower the number of slots ({message})"
    )]
    OutOfMemory {
        /// Tokens of the prompt and of the answer so far.
        tokens: usize,
        /// The first line of the allocator's message.
        message: String,
    },
    /// Trees are to be verified, but a model cannot do so.
    #[error("trees cannot be verified: {0}")]
    NoTrees(&'static str),
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

/// Identifies a submitted request within one engine.
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

/// Verification of one drafted block or tree.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cycle {
    /// Drafted tokens that were verified, up to an accepted stop token. A tree counts with its depth.
    pub proposed: u32,
    /// Nodes of the tree that were verified, down to the depth `proposed`; 0 for a block.
    #[serde(default, skip_serializing_if = "crate::is_zero")]
    pub nodes: u32,
    /// Proposed tokens up to and including the first drafted stop token, accepted or not. Tokens
    /// after a stop token can be part of no answer. A tree counts with the depth of its longest such path.
    #[serde(rename = "usable")]
    pub until_stop: u32,
    /// Drafted tokens that were accepted.
    pub accepted: u32,
    /// Tokens that the cycle committed.
    pub committed: u32,
    /// Confidence logits of the proposed tokens; empty without a confidence head.
    pub confidence: Vec<f32>,
}

impl Cycle {
    /// The confidence logits up to the first drafted stop token. Drafters are not trained on tokens
    /// after a stop token, so their confidence there is meaningless.
    pub fn confidence_until_stop(&self) -> &[f32] {
        &self.confidence[..self.confidence.len().min(self.until_stop as usize)]
    }
}

/// A finished sequence.
#[derive(Debug, Clone)]
pub struct Completion {
    /// The request's id.
    pub id: String,
    /// Generated tokens, at most `max_new_tokens`, including a final stop token.
    pub tokens: Vec<i64>,
    /// Why it ended.
    pub finish: Finish,
    /// Verification cycles of the sequence. Empty if the first token was a stop token.
    pub cycles: Vec<Cycle>,
}

/// Something that happened in a step.
#[derive(Debug)]
pub enum Event {
    /// New tokens of a sequence.
    Tokens(RequestId, Vec<i64>),
    /// A sequence ended; its tokens were reported before.
    Done(RequestId, Completion),
    /// A sequence failed with [`EngineError::NotFinite`] or [`EngineError::OutOfMemory`]. Other
    /// sequences continue.
    Failed(RequestId, EngineError),
}

/// How the drafter chooses tokens. Answers follow the target's distribution either way, but the
/// acceptance rate differs at temperatures above 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DraftSampling {
    /// Samples the drafter's distribution q with the sequence's settings. A token is accepted with
    /// probability Σ min(p, q). vLLM calls this `draft_sample_method: probabilistic`.
    #[default]
    Probabilistic,
    /// Takes the drafter's argmax, which is accepted with the target's probability p(argmax q).
    /// This is the rule of llama.cpp and the default of vLLM.
    Greedy,
}

impl DraftSampling {
    /// Probabilistic for greedy, and greedy for probabilistic.
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

/// Rule that accepts drafted tokens. Answers follow the target's distribution under every rule. At temperature 0 the rules of blocks accept
/// the same tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum VerifyRule {
    /// Accepts token by token, up to the first rejection: [`deepspec_ops::verify`]. vLLM calls this
    /// `rejection_sample_method: standard`.
    #[default]
    Token,
    /// Accepts blocks as a whole: [`deepspec_ops::verify_block`]. vLLM calls this
    /// `rejection_sample_method: block`.
    Block,
    /// Verifies a tree of the drafter's likeliest tokens: [`deepspec_ops::DraftTree::accept`].
    Tree(TreeBudget),
}

impl VerifyRule {
    /// Whether tokens are accepted one by one.
    pub fn is_token(&self) -> bool {
        *self == Self::Token
    }

    /// Limits of the trees; None if blocks are verified.
    pub fn tree_budget(&self) -> Option<TreeBudget> {
        if let Self::Tree(budget) = self { Some(*budget) } else { None }
    }

    /// Most drafted tokens of a sequence that a step verifies, with a drafter of blocks of `draft_len` tokens; 0 without a drafter.
    pub fn max_drafted(&self, draft_len: usize) -> usize {
        match self.tree_budget() {
            Some(budget) if draft_len > 0 => budget.nodes.max(draft_len),
            _ => draft_len,
        }
    }

    /// The rule in words, as in "verified …".
    pub fn phrase(&self) -> String {
        match self {
            Self::Token => "token by token".into(),
            Self::Block => "as a block".into(),
            Self::Tree(TreeBudget { nodes, width }) => {
                format!("as trees of at most {nodes} nodes and {width} children of a node")
            }
        }
    }
}

impl FromStr for VerifyRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "token" => Ok(Self::Token),
            None if text == "block" => Ok(Self::Block),
            Some(("tree", budget)) => budget.parse().map(Self::Tree),
            _ => Err("expected token, block, tree:N or tree:N:W".into()),
        }
    }
}

/// The name that [`FromStr`] reads.
impl fmt::Display for VerifyRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Token => f.write_str("token"),
            Self::Block => f.write_str("block"),
            Self::Tree(budget) => write!(f, "tree:{budget}"),
        }
    }
}

impl TryFrom<String> for VerifyRule {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<VerifyRule> for String {
    fn from(rule: VerifyRule) -> Self {
        rule.to_string()
    }
}

/// How the engine runs.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Sequences decoded at once.
    pub slots: usize,
    /// Maximum tokens (prompt and answer) of one slot.
    pub context: usize,
    /// Maximum number of drafted tokens to verify per cycle.
    pub max_draft_tokens: Option<usize>,
    /// How drafted tokens are chosen.
    pub draft_sampling: DraftSampling,
    /// How drafted tokens are accepted.
    pub verify_rule: VerifyRule,
    /// Runs one more cycle when exactly `max_new_tokens` are generated, because the reference's
    /// loop runs and counts such a cycle.
    pub counts_overrun: bool,
}

/// Wall-clock time of the parts of a step.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepTimes {
    /// Time of drafting.
    pub draft: Duration,
    /// Time of the target's forwards, of verification and of waiting for its results.
    pub verify: Duration,
    /// Time of everything on the host.
    pub host: Duration,
    /// Number of steps.
    pub steps: u64,
}
