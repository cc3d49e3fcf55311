//! Backends that answer requests: servers over HTTP, or a model in this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::anyhow;
use deepspec_engine::EngineError;
use deepspec_serve::{ChatError, ChatModel, ChatRequest, parse_chat_request, random_u64};
use serde_json::{Map, Value, json};

use super::answer::{Answer, AskError, TokenCounts};
use super::pool::Pool;

/// A backend that answers requests.
pub enum Backend {
    /// OpenAI-compatible servers.
    Servers(Arc<Pool>),
    /// A model in this process.
    Embedded(Embedded),
}

/// A model in this process.
pub struct Embedded {
    /// The model.
    pub model: Box<ChatModel>,
    /// The model's name in requests.
    pub name: String,
    /// Number of requests in progress.
    pub in_flight: AtomicUsize,
}

impl Backend {
    /// Sends the body of a chat completion request. `home` is the server that answered the
    /// conversation's previous turn.
    pub async fn ask(&self, body: Map<String, Value>, home: &mut Option<usize>) -> Result<Answer, AskError> {
        match self {
            Self::Servers(pool) => pool.ask(&body, home).await,
            Self::Embedded(embedded) => {
                let error = match embedded.ask(Value::Object(body)).await {
                    Ok(answer) => return Ok(answer),
                    Err(error) => error,
                };
                Err(match error {
                    ChatError::Internal(_) => AskError::Run(error.into()),
                    // Non-finite logits may be caused by the text of one row. If a short prompt
                    // causes them too, the model is broken.
                    ChatError::Engine(EngineError::NotFinite) if embedded.is_broken().await => AskError::Run(
                        anyhow!(error).context(format!("the model {} answers nothing", embedded.name)),
                    ),
                    refused => AskError::Row(refused.to_string()),
                })
            }
        }
    }

    /// Number of requests in progress.
    pub fn in_flight(&self) -> usize {
        match self {
            Self::Servers(pool) => pool.in_flight(),
            Self::Embedded(embedded) => embedded.in_flight.load(Ordering::Relaxed),
        }
    }
}

impl Embedded {
    /// Whether even a short prompt gives logits that are not finite.
    async fn is_broken(&self) -> bool {
        let question = json!({
            "model": self.name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0,
        });
        matches!(self.ask(question).await, Err(ChatError::Engine(EngineError::NotFinite)))
    }

    async fn ask(&self, body: Value) -> Result<Answer, ChatError> {
        // `serve` parses requests with the same function, so that both give equal answers.
        let defaults = self.model.defaults();
        let request = parse_chat_request(body.to_string().as_bytes(), &self.name, defaults, random_u64())?;
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        let answer = self.answer(&request).await;
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        answer
    }

    async fn answer(&self, request: &ChatRequest) -> Result<Answer, ChatError> {
        let mut reply = self.model.start(request)?;
        let whole = reply.collect().await?;
        if whole.is_empty() {
            return Err(ChatError::Empty);
        }
        let usage = reply.usage();
        Ok(Answer {
            content: whole.content,
            // The reasoning is already separate, so think tags in the content stay.
            thoughts: Some(whole.reasoning),
            tool_calls: None,
            finish: reply.finish_reason().unwrap_or_default(),
            tokens: TokenCounts { prompt: usage.prompt as u64, completion: usage.completion as u64 },
            // A padded vocabulary has ids beyond the tokenizer's. Without ids, training tokenises
            // the text.
            token_ids: (request.return_token_ids && self.model.has_token_ids(reply.token_ids()))
                .then(|| json!(reply.token_ids())),
            prompt_token_ids: request.return_token_ids.then(|| json!(reply.prompt_token_ids())),
            ..Answer::default()
        })
    }
}
