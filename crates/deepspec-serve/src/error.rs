//! Why a chat request is refused, in the OpenAI API's terms.

use deepspec_engine::EngineError;

/// A request that cannot be answered.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The body is not JSON.
    #[error("the body is not valid JSON: {0}")]
    Malformed(String),
    /// A field has a wrong type or value.
    #[error("`{param}`: {problem}")]
    Field {
        /// Path of the field.
        param: String,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// Another model than the served one.
    #[error("the model `{wanted}` does not exist; this server has `{served}`")]
    UnknownModel {
        /// Name in the request.
        wanted: String,
        /// Name of the served model.
        served: String,
    },
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {prompt} tokens or more, but the context holds {context}, prompt and answer together; shorten the messages"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that a slot holds.
        context: usize,
    },
    /// The chat template refuses the messages.
    #[error("the chat template refuses the messages: {0}")]
    Template(String),
    /// The model ended its turn at once.
    #[error("the answer has no text")]
    Empty,
    /// The request does not bring the server's key.
    #[error("this server wants its API key as `Authorization: Bearer KEY`")]
    Unauthorised,
    /// All slots are taken, and as many requests wait as may.
    #[error("all {slots} slots are taken and {queue} requests are waiting; try again later")]
    Busy {
        /// Requests that are answered at once.
        slots: usize,
        /// Requests that may wait.
        queue: usize,
    },
    /// The engine refuses the request, or gave it up.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Our own failure.
    #[error("the server failed: {0}")]
    Internal(String),
}

impl ChatError {
    /// A [`ChatError::Field`].
    pub fn field(param: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Field { param: param.into(), problem: problem.into() }
    }

    /// The HTTP status.
    pub fn status(&self) -> u16 {
        match self {
            Self::Unauthorised => 401,
            Self::UnknownModel { .. } => 404,
            Self::Busy { .. } => 503,
            Self::Internal(_) | Self::Empty => 500,
            Self::Engine(error) => engine_status(error),
            Self::Malformed(_) | Self::Field { .. } | Self::TooLong { .. } | Self::Template(_) => 400,
        }
    }

    /// The field to blame, where there is one.
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::Field { param, .. } => Some(param),
            Self::UnknownModel { .. } => Some("model"),
            Self::TooLong { .. } | Self::Template(_) => Some("messages"),
            _ => None,
        }
    }

    /// OpenAI's machine-readable name, where there is one.
    pub fn code(&self) -> Option<&'static str> {
        match self {
            Self::UnknownModel { .. } => Some("model_not_found"),
            Self::Unauthorised => Some("invalid_api_key"),
            Self::Busy { .. } => Some("queue_full"),
            Self::TooLong { .. }
            | Self::Engine(EngineError::TooLong { .. } | EngineError::TooLarge { .. }) => {
                Some("context_length_exceeded")
            }
            _ => None,
        }
    }
}

/// The HTTP status of what the engine says: whose fault it is, and whether it may be tried again.
fn engine_status(error: &EngineError) -> u16 {
    match error {
        EngineError::EmptyPrompt
        | EngineError::NoTokens
        | EngineError::TooLong { .. }
        | EngineError::TooLarge { .. }
        | EngineError::UnknownToken { .. } => 400,
        EngineError::NotFinite => 500,
        EngineError::OutOfMemory { .. } => 503,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_say_whose_fault_it_is_and_whether_it_may_be_tried_again() {
        let cases = [
            (EngineError::TooLarge { tokens: 100, bytes: 2000, memory: 1000 }, 400),
            (EngineError::OutOfMemory { tokens: 100, words: "out of memory".into() }, 503),
            (EngineError::NotFinite, 500),
        ];
        for (error, status) in cases {
            let told = error.to_string();
            assert_eq!(ChatError::from(error).status(), status, "{told}");
        }
    }
}
