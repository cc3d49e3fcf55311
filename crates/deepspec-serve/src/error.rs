//! Errors of chat requests, as in the OpenAI API.

use deepspec_engine::EngineError;

/// Why a request cannot be answered.
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
        /// The problem and the remedy.
        problem: String,
    },
    /// The request names a model that is not served.
    #[error("the model `{wanted}` does not exist; this server has `{served}`")]
    UnknownModel {
        /// Name in the request.
        wanted: String,
        /// Name of the served model.
        served: String,
    },
    /// The prompt leaves no tokens for an answer.
    #[error(
        "the prompt has {prompt} tokens or more, but the context holds {context}, prompt and answer together; shorten the messages"
    )]
    TooLong {
        /// Number of tokens in the prompt.
        prompt: usize,
        /// Context length of a slot, in tokens.
        context: usize,
    },
    /// The chat template rejects the messages.
    #[error("the chat template refuses the messages: {0}")]
    Template(String),
    /// The model ended its turn without text.
    #[error("the answer has no text")]
    Empty,
    /// The request lacks the server's API key.
    #[error("this server wants its API key as `Authorization: Bearer KEY`")]
    Unauthorised,
    /// All slots are in use and the queue is full.
    #[error("all {slots} slots are taken and {queue} requests are waiting; try again later")]
    Busy {
        /// Number of slots.
        slots: usize,
        /// Length of the queue.
        queue: usize,
    },
    /// The engine rejected or aborted the request.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// An internal failure.
    #[error("the server failed: {0}")]
    Internal(String),
}

impl ChatError {
    /// Creates a [`ChatError::Field`].
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

    /// The request field that caused the error; None if no single field caused it.
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::Field { param, .. } => Some(param),
            Self::UnknownModel { .. } => Some("model"),
            Self::TooLong { .. } | Self::Template(_) => Some("messages"),
            _ => None,
        }
    }

    /// The error code of the OpenAI API; None if the API has no code for this error.
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

/// HTTP status of an engine error: a client or server fault, and whether a retry makes sense.
fn engine_status(error: &EngineError) -> u16 {
    match error {
        EngineError::EmptyPrompt
        | EngineError::NoTokens
        | EngineError::TooLong { .. }
        | EngineError::TooLarge { .. }
        | EngineError::UnknownToken { .. } => 400,
        EngineError::NotFinite | EngineError::NoTrees(_) => 500,
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
            (EngineError::OutOfMemory { tokens: 100, message: "out of memory".into() }, 503),
            (EngineError::NotFinite, 500),
        ];
        for (error, status) in cases {
            let told = error.to_string();
            assert_eq!(ChatError::from(error).status(), status, "{told}");
        }
    }
}
