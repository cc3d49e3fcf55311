//! Who answers: servers over HTTP, or the model in this process.

use deepspec_text::{Message, Role};
use serde_json::Value;

use super::client::Client;
use crate::chat::{self, ChatError, ChatModel};

/// An answer to one turn.
pub struct Answer {
    /// What the assistant says, and thinks if the server tells.
    pub message: Message,
    /// Its length in tokens, 0 where the server does not tell.
    pub tokens: u64,
}

impl Answer {
    /// An answer from its parts.
    pub fn new(content: String, reasoning: Option<String>, tokens: u64) -> Self {
        let reasoning_content = reasoning.filter(|reasoning| !reasoning.is_empty());
        Self { message: Message { reasoning_content, ..Message::new(Role::Assistant, content) }, tokens }
    }
}

/// Why there is no answer.
#[derive(Debug)]
pub enum AskError {
    /// The row cannot be answered; others may.
    Row(String),
    /// No row can be answered; those without an answer stay pending.
    Run(anyhow::Error),
}

/// Who answers.
pub enum Asker {
    /// OpenAI-compatible servers.
    Servers(Client),
    /// A model in this process and the name that requests use for it.
    Embedded(Box<ChatModel>, String),
}

impl Asker {
    /// Checks that somebody is there.
    ///
    /// # Errors
    /// If no server answers.
    pub async fn check(&self) -> anyhow::Result<()> {
        match self {
            Self::Servers(client) => client.check().await,
            Self::Embedded(..) => Ok(()),
        }
    }

    /// Asks with the body of a chat completion request.
    pub async fn ask(&self, body: &Value) -> Result<Answer, AskError> {
        match self {
            Self::Servers(client) => client.ask(body).await,
            Self::Embedded(model, name) => embedded(model, name, body).await.map_err(|error| match error {
                ChatError::Internal(_) => AskError::Run(error.into()),
                refused => AskError::Row(refused.to_string()),
            }),
        }
    }
}

async fn embedded(model: &ChatModel, name: &str, body: &Value) -> Result<Answer, ChatError> {
    // The same door as `serve`'s, so that both give the same answers.
    let request = chat::parse(body.to_string().as_bytes(), name, chat::fresh_number())?;
    let mut reply = model.start(&request)?;
    let whole = reply.collect().await?;
    Ok(Answer::new(whole.content, Some(whole.reasoning), reply.usage().completion as u64))
}
