//! What is wrong with a row.

/// What is wrong with a row; a phrase to follow "file:line: id: ".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// No token is supervised.
    #[error("the mask is empty: {why}")]
    Empty {
        /// What it lacks.
        why: String,
    },
    /// A supervised place repeats no message of the assistant's.
    #[error("{found:?} is supervised, but no assistant's message says it: {why}")]
    Stray {
        /// The beginning of the place.
        found: String,
        /// Where it may come from.
        why: String,
    },
    /// A message of the assistant's is nowhere supervised.
    #[error("conversations[{index}]: the assistant's message is not supervised")]
    Missing {
        /// Its place, from 0.
        index: usize,
    },
    /// A supervised place says something else than the message it repeats.
    #[error(
        "conversations[{index}]: the template rewrites the assistant's {part}: the message has {said:?} where the mask has {found:?}, from character {at} on"
    )]
    Rewritten {
        /// The message's place, from 0.
        index: usize,
        /// `answer` or `thoughts`.
        part: &'static str,
        /// The message around the first difference.
        said: String,
        /// The supervised text around it.
        found: String,
        /// The first different character, from 0.
        at: usize,
    },
    /// The prompt that asks for an answer is not how the training text begins.
    #[error(
        "conversations[{index}]: the template differs from the served one at token {at}: behind {before:?} the served prompt{thinking} has {served:?}, the training text {trained:?}"
    )]
    Served {
        /// The answer's place, from 0.
        index: usize,
        /// The first different token, from 0.
        at: usize,
        /// The common text before it.
        before: String,
        /// How the prompt was rendered, as " without thinking"; empty where the template does not care.
        thinking: &'static str,
        /// The served prompt's token.
        served: String,
        /// The training text's token.
        trained: String,
    },
    /// The template does not render the prompt that asks for an answer.
    #[error("conversations[{index}]: no prompt can be served for the answer: {why}")]
    Unservable {
        /// The answer's place, from 0.
        index: usize,
        /// What the template says.
        why: String,
    },
}

/// What is wrong with a row and what is worth knowing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checked {
    /// What is wrong.
    pub problems: Vec<Problem>,
    /// Answers whose thoughts the template leaves out, as most do once the user speaks again.
    pub thoughts_left_out: usize,
    /// Answers of tool calls alone that the template does not write, so that nothing of them is learned.
    pub calls_left_out: usize,
    /// Tool calls with recorded results that are trained on, whoever wrote them.
    pub recorded_calls: usize,
    /// Assistant messages that are not trained on, because their `weight` is 0.
    pub untrained: usize,
    /// Earlier answers that the training text shows without what ended the prompt they were given to, such as an empty
    /// block of thoughts.
    pub outside_their_prompt: usize,
}
