//! Prompts: a conversation up to the start of its next answer.

use serde_json::{Map, Value};

use crate::conversation::Conversation;
use crate::error::TextError;
use crate::message::{Message, Role};
use crate::template::RenderOptions;
use crate::tokenizer::ChatTokenizer;

/// The token ids of the prompt for the next answer. `default_system` is the system message of
/// conversations without one. `thinking` sets the template's `enable_thinking`; `None` leaves it to
/// the template.
///
/// # Errors
/// If the template refuses the conversation or the tokenizer fails.
pub fn generation_prompt(
    tokenizer: &ChatTokenizer,
    messages: &[Message],
    default_system: Option<&str>,
    thinking: Option<bool>,
) -> Result<Vec<i64>, TextError> {
    tokenizer.encode(&render_prompt(tokenizer, &with_system(messages, default_system), None, thinking)?)
}

/// The token ids of the prompt for a conversation's next answer, with tools, as a server renders it
/// by default.
///
/// # Errors
/// If the template refuses the conversation or the tokenizer fails.
pub fn served_prompt(tokenizer: &ChatTokenizer, conversation: &Conversation) -> Result<Vec<i64>, TextError> {
    let Conversation { messages, tools } = conversation;
    tokenizer.encode(&render_prompt(tokenizer, messages, tools.as_ref(), None)?)
}

/// Whether the last answer in `ids` of a whole conversation follows a prompt with thinking. None if
/// `enable_thinking` does not change the prompt, or no answer is found.
///
/// # Errors
/// If the template refuses a question without a system message, or the tokenizer does not have the
/// ids.
pub fn detect_trained_thinking(tokenizer: &ChatTokenizer, ids: &[i64]) -> Result<Option<bool>, TextError> {
    const QUESTION: &str = "Hi";
    let question = [Message::new(Role::User, QUESTION)];
    let prompt = |thinking| render_prompt(tokenizer, &question, None, Some(thinking));
    let (on, off) = (prompt(true)?, prompt(false)?);
    let common = on.char_indices().zip(off.chars()).find(|&((_, a), b)| a != b).map(|((at, _), _)| at);
    let common = common.unwrap_or(on.len().min(off.len()));
    let Some(asked) = on[..common].rfind(QUESTION).filter(|_| on != off) else { return Ok(None) };
    let header = &on[asked + QUESTION.len()..common];
    let text = tokenizer.decode(ids, false)?;
    let Some((_, answer)) = text.rsplit_once(header).filter(|(_, answer)| !answer.is_empty()) else {
        return Ok(None);
    };
    let forms = [(&on[common..], true), (&off[common..], false)];
    let fits = forms.into_iter().filter(|(form, _)| answer.starts_with(form));
    // The prompt with thinking may be a prefix of the prompt without it, or the reverse.
    Ok(fits.max_by_key(|(form, _)| form.len()).map(|(_, thinking)| thinking))
}

/// The text of the prompt for the answer to `messages`, with `tools`.
pub(crate) fn render_prompt(
    tokenizer: &ChatTokenizer,
    messages: &[Message],
    tools: Option<&Value>,
    thinking: Option<bool>,
) -> Result<String, TextError> {
    let kwargs: Map<String, Value> =
        thinking.map(|thinking| ("enable_thinking".to_owned(), Value::Bool(thinking))).into_iter().collect();
    let options = RenderOptions { add_generation_prompt: true, kwargs, tools: tools.cloned() };
    tokenizer.render(messages, &options)
}

/// Puts `default_system` before the messages, unless they begin with a system message.
pub(crate) fn with_system(messages: &[Message], default_system: Option<&str>) -> Vec<Message> {
    let own = messages.first().is_some_and(|message| message.role == Role::System);
    let default = default_system.filter(|_| !own).map(|content| Message::new(Role::System, content));
    default.into_iter().chain(messages.iter().cloned()).collect()
}
