//! What a model is asked: a conversation that ends where its answer begins.

use serde_json::{Map, Value};

use crate::error::TextError;
use crate::message::{Message, Role};
use crate::template::RenderOptions;
use crate::tokenizer::ChatTokenizer;

/// The ids that ask for the next answer. `default_system` speaks first where the conversation has no system message;
/// `thinking` sets the template's `enable_thinking`, `None` leaves it to the template.
///
/// # Errors
/// If the template refuses the conversation or the tokenizer fails.
pub fn generation_prompt(
    tokenizer: &ChatTokenizer,
    messages: &[Message],
    default_system: Option<&str>,
    thinking: Option<bool>,
) -> Result<Vec<i64>, TextError> {
    let kwargs: Map<String, Value> =
        thinking.map(|thinking| ("enable_thinking".to_owned(), Value::Bool(thinking))).into_iter().collect();
    let options = RenderOptions { add_generation_prompt: true, kwargs, tools: None };
    tokenizer.encode(&tokenizer.render(&with_system(messages, default_system), &options)?)
}

/// The messages, opened by `default_system` unless they open with a system message of their own.
pub(crate) fn with_system(messages: &[Message], default_system: Option<&str>) -> Vec<Message> {
    let own = messages.first().is_some_and(|message| message.role == Role::System);
    let default = default_system.filter(|_| !own).map(|content| Message::new(Role::System, content));
    default.into_iter().chain(messages.iter().cloned()).collect()
}
