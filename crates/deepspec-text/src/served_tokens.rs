//! Replaces a row's token ids by the ids that the server generated, if the row has them.
//!
//! Tokenising a target's text may not give the ids that the target generated. An answer's leading
//! line break merges with the one before it, and sampled tokens are not always the tokenizer's
//! choice. A drafter predicts the target's tokens, so they replace the ids of the text.

use deepspec_core::jsonl::json_type_name;
use serde_json::Value;

use crate::conversation::{Conversation, PROMPT_TOKEN_IDS, TOKEN_IDS};
use crate::error::TextError;
use crate::mask::{Served, Supervised};
use crate::message::{Message, Role};
use crate::prompt::render_prompt;
use crate::rules::{ChatTemplate, MaskRule};
use crate::tokenizer::ChatTokenizer;

/// The token ids of the last answer's prompt, and of the answer.
struct PromptAndCompletion {
    prompt: Vec<i64>,
    answer: Vec<i64>,
}

impl Supervised {
    /// Replaces the ids with the served ones, if the last message has them. Earlier answers are
    /// part of that message's prompt. They stay supervised only where the prompt's ids equal the
    /// text's.
    ///
    /// # Errors
    /// If the ids are malformed, or the template refuses the conversation.
    pub(crate) fn with_served_ids(
        self,
        tokenizer: &ChatTokenizer,
        template: &ChatTemplate,
        conversation: &Conversation,
        max_length: usize,
    ) -> Result<Self, TextError> {
        let Some(exchange) = read_served_exchange(tokenizer, template, conversation, &self.text)? else {
            return Ok(self);
        };
        let PromptAndCompletion { prompt, answer } = exchange;
        let border = prompt.len();
        let mut ids = prompt;
        ids.extend(answer);
        let untruncated_len = ids.len();
        ids.truncate(max_length);
        // The template may write more after the answer.
        let same = ids.iter().zip(&self.input_ids).take_while(|(a, b)| a == b).count();
        if same == ids.len() {
            return Ok(Self { served: Served::SameAsText, ..self });
        }
        let mask = |place: usize| place >= border || (place < same && self.loss_mask[place]);
        let loss_mask = (0..ids.len()).map(mask).collect();
        Ok(Self { input_ids: ids, loss_mask, untruncated_len, served: Served::DiffersFromText, ..self })
    }
}

fn read_served_exchange(
    tokenizer: &ChatTokenizer,
    template: &ChatTemplate,
    conversation: &Conversation,
    text: &str,
) -> Result<Option<PromptAndCompletion>, TextError> {
    let Some((last, before)) = conversation.messages.split_last() else { return Ok(None) };
    if !last.is_trained_on() || last.is_empty() {
        return Ok(None);
    }
    let Some(mut answer) = read_token_ids(tokenizer, last, TOKEN_IDS)? else { return Ok(None) };
    if !decodes_to_message(tokenizer, &answer, last)? {
        return Ok(None);
    }
    let prompt = match read_token_ids(tokenizer, last, PROMPT_TOKEN_IDS)? {
        Some(prompt) => Some(prompt),
        None => find_matching_prompt(tokenizer, conversation, before, &answer, text)?,
    };
    let Some(prompt) = prompt else { return Ok(None) };
    let question = before.iter().rfind(|message| message.role == Role::User);
    if question.is_some_and(|question| !matches!(decodes_to_message(tokenizer, &prompt, question), Ok(true)))
    {
        return Ok(None);
    }
    // Some engines omit the token that ends an answer.
    let end = match &template.rule {
        MaskRule::Markers(markers) => tokenizer.encode(&markers.end_of_turn)?.first().copied(),
        MaskRule::Generation => tokenizer.eos_token_id(),
    };
    if !last.is_truncated() && !answer.last().is_some_and(|&last| tokenizer.is_special(last)) {
        answer.extend(end);
    }
    Ok(Some(PromptAndCompletion { prompt, answer }))
}

/// Whether the ids decode to the message's text. The message may have been edited, or the ids may
/// be another model's.
fn decodes_to_message(tokenizer: &ChatTokenizer, ids: &[i64], message: &Message) -> Result<bool, TextError> {
    Ok(tokenizer.decode(ids, true)?.contains(message.content.trim()))
}

/// Finds the prompt of an answer if its server did not report it. Renders the prompt with and
/// without thinking. Returns the prompt that the answer follows in the training text.
fn find_matching_prompt(
    tokenizer: &ChatTokenizer,
    conversation: &Conversation,
    before: &[Message],
    answer: &[i64],
    text: &str,
) -> Result<Option<Vec<i64>>, TextError> {
    let said = tokenizer.decode(answer, true)?;
    for thinking in [None, Some(false), Some(true)] {
        let prompt = render_prompt(tokenizer, before, conversation.tools.as_ref(), thinking)?;
        let rest = text.strip_prefix(prompt.as_str());
        if rest.is_some_and(|rest| rest.trim_start().starts_with(said.trim())) {
            return tokenizer.encode(&prompt).map(Some);
        }
    }
    Ok(None)
}

/// Whether thinking was on for the last answer, judged by its recorded prompt ids. None if the row
/// has no such ids, the template has no such switch, or the ids match neither setting.
///
/// # Errors
/// If the ids are malformed, or the template refuses the conversation.
pub fn detect_served_thinking(
    tokenizer: &ChatTokenizer,
    conversation: &Conversation,
) -> Result<Option<bool>, TextError> {
    let Some((last, before)) = conversation.messages.split_last() else { return Ok(None) };
    let Some(served) = read_token_ids(tokenizer, last, PROMPT_TOKEN_IDS)? else { return Ok(None) };
    let prompt = |thinking| render_prompt(tokenizer, before, conversation.tools.as_ref(), Some(thinking));
    let (on, off) = (prompt(true)?, prompt(false)?);
    if on == off {
        return Ok(None);
    }
    let is_served = |prompt: &str| Ok::<_, TextError>(tokenizer.encode(prompt)? == served);
    Ok(if is_served(&on)? {
        Some(true)
    } else if is_served(&off)? {
        Some(false)
    } else {
        None
    })
}

/// The ids in a message's field.
fn read_token_ids(
    tokenizer: &ChatTokenizer,
    message: &Message,
    name: &'static str,
) -> Result<Option<Vec<i64>>, TextError> {
    let wrong = |found: String| TextError::ServedIds { name, found };
    let list = match message.extra.get(name) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong(json_type_name(other).into())),
    };
    let vocab_size = tokenizer.vocab_size() as i64;
    let id = |value: &Value| value.as_i64().filter(|id| (0..vocab_size).contains(id));
    let ids = list.iter().map(|value| id(value).ok_or_else(|| wrong(value.to_string())));
    let ids: Vec<i64> = ids.collect::<Result<_, _>>()?;
    Ok((!ids.is_empty()).then_some(ids))
}
