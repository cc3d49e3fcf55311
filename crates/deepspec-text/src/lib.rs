//! Conversations, chat templates, token ids and loss masks.
//!
//! A row's `conversations` become [`Message`]s, the tokenizer's own chat template turns them into text, and
//! [`supervise`] into token ids with the mask of what a drafter learns from.

mod error;
mod json;
mod mask;
mod message;
mod prompt;
mod stream;
mod template;
mod tokenizer;

pub use error::TextError;
pub use mask::{ChatTemplate, MIN_SUPERVISED_TOKENS, Supervised, supervise};
pub use message::{
    Message, MessageError, Role, RowError, check_has_text, check_starts_with_user, conversation, sharegpt,
};
pub use prompt::generation_prompt;
pub use stream::TokenStream;
pub use template::RenderOptions;
pub use tokenizer::ChatTokenizer;
