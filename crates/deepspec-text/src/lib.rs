//! Conversations, chat templates, token ids and loss masks.
//!
//! A row's `conversations` become [`Message`]s, and the tokenizer's chat template renders them as
//! text. [`supervise`] turns the text into token ids and the loss mask of a drafter's training.

mod check;
mod conversation;
mod error;
mod finish;
mod generation;
mod json;
mod mask;
mod message;
mod prefixes;
mod problem;
mod prompt;
mod prompt_check;
mod reasoning;
mod reasoning_tokens;
mod records;
mod rendering;
mod rules;
mod served_tokens;
mod stream;
mod template;
mod tokenizer;

pub use check::check_loss_mask;
pub use conversation::{Conversation, PROMPT_TOKEN_IDS, TOKEN_IDS};
pub use error::TextError;
pub use finish::{Completeness, FINISH_REASON, FinishReason};
pub use mask::{MIN_SUPERVISED_TOKENS, Served, Supervised, supervise};
pub use message::{Message, MessageError, REASONING_FIELDS, Role, TEXT_FIELDS, WEIGHT};
pub use problem::{Problem, RowFindings};
pub use prompt::{detect_trained_thinking, generation_prompt, served_prompt};
pub use reasoning::{THINK_TAGS, ThinkTags, without_reasoning};
pub use records::{
    MESSAGE_KEYS, RawMessages, RowError, check_starts_with_user, find_messages, is_message, is_record_key,
    parse_messages, system_message, warn_about_two_fields,
};
pub use rules::{Channels, ChatFormat, ChatTemplate, MaskRule, TurnMarkers};
pub use served_tokens::detect_served_thinking;
pub use stream::IncrementalDetokenizer;
pub use template::RenderOptions;
pub use tokenizer::{ChatTokenizer, Encoded, is_reserved_name};
