//! Problems of a row that the check reports.

/// A problem of a row; a phrase that follows "file:line: id: ".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// No token is supervised.
    #[error("the mask is empty: {why}")]
    Empty {
        /// The reason.
        why: String,
    },
    /// Supervised text that belongs to no assistant message.
    #[error("{found:?} is supervised, but no assistant's message says it: {why}")]
    Stray {
        /// The beginning of the text.
        found: String,
        /// Possible origin of the problem.
        why: String,
    },
    /// An assistant message without supervised text.
    #[error("conversations[{index}]: the assistant's message is not supervised")]
    Missing {
        /// The message's index, from 0.
        index: usize,
    },
    /// Supervised text that differs from its message.
    #[error(
        "conversations[{index}]: the template rewrites the assistant's {part}: the message has {said:?} where the mask has {found:?}, from character {at} on"
    )]
    Rewritten {
        /// The message's index, from 0.
        index: usize,
        /// `answer` or `thoughts`.
        part: &'static str,
        /// The message around the first difference.
        said: String,
        /// The supervised text around the first difference.
        found: String,
        /// The first different character, from 0.
        at: usize,
    },
    /// Tool calls of an assistant message of which the template writes some only, as that of gpt-oss.
    #[error(
        "conversations[{index}]: the template writes {written} of the message's {calls} tool calls; give each call a message of its own"
    )]
    Calls {
        /// The message's index, from 0.
        index: usize,
        /// Number of calls in the supervised text.
        written: usize,
        /// Number of the message's calls.
        calls: usize,
    },
    /// The training text does not begin with the served prompt of an answer.
    #[error(
        "conversations[{index}]: the template differs from the served one at token {at}: behind {before:?} the served prompt{thinking} has {served:?}, the training text {trained:?}"
    )]
    Served {
        /// The answer's index, from 0.
        index: usize,
        /// The first different token, from 0.
        at: usize,
        /// The common text before it.
        before: String,
        /// How the prompt was rendered, such as " without thinking"; empty for the template's
        /// default.
        thinking: &'static str,
        /// The served prompt's token.
        served: String,
        /// The training text's token.
        trained: String,
    },
    /// The template does not render the prompt of an answer.
    #[error("conversations[{index}]: no prompt can be served for the answer: {why}")]
    Unservable {
        /// The answer's index, from 0.
        index: usize,
        /// The template's error.
        why: String,
    },
}

/// Problems and counts of a checked row.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RowFindings {
    /// The problems.
    pub problems: Vec<Problem>,
    /// Answers whose reasoning the template drops, as most templates do after the next user
    /// message.
    pub reasoning_left_out: usize,
    /// Answers that consist of tool calls only and that the template does not render. None of their
    /// tokens is supervised.
    pub calls_left_out: usize,
    /// Supervised tool calls with recorded results. The target or another model wrote them.
    pub recorded_calls: usize,
    /// Assistant messages that are not trained on because their `weight` is 0.
    pub untrained: usize,
    /// Earlier answers that follow another prompt in training than in serving. Templates drop, for
    /// example, empty think blocks from earlier turns.
    pub prompt_mismatch_earlier: usize,
}
