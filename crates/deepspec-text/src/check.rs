//! Checks the loss mask of a conversation against its assistant messages and served prompts.

use serde_json::Value;

use crate::conversation::Conversation;
use crate::error::TextError;
use crate::mask::{Supervised, messages_of_ranges, strip_end_of_turn};
use crate::message::{Message, Role};
use crate::problem::{Problem, RowFindings};
use crate::prompt_check::PromptCheck;
use crate::reasoning;
use crate::rules::ChatTemplate;
use crate::tokenizer::ChatTokenizer;

/// Characters shown before and after a difference.
const EXCERPT_CHARS: usize = 16;

/// Compares the supervised text of a conversation with its assistant messages. Also compares the
/// training text with the prompt that a server renders before each answer.
///
/// # Errors
/// If the tokenizer fails.
pub fn check_loss_mask(
    tokenizer: &ChatTokenizer,
    template: &ChatTemplate,
    conversation: &Conversation,
    supervised: &Supervised,
) -> Result<RowFindings, TextError> {
    let template = &*template.for_conversation(conversation);
    let mut checked = RowFindings::default();
    let assistants = || conversation.messages.iter().filter(|message| message.role == Role::Assistant);
    checked.untrained = assistants().filter(|message| !message.is_trained_on()).count();
    checked.recorded_calls = conversation.messages.windows(2).map(recorded_calls).sum();
    if supervised.supervised_count() == 0 {
        checked.problems.push(Problem::Empty { why: empty_mask_reason(template, conversation, supervised) });
        if supervised.text_ranges.is_empty() {
            return Ok(checked);
        }
    }
    check_answer_texts(tokenizer, template, conversation, supervised, &mut checked);
    PromptCheck { tokenizer, template, conversation, supervised }.check_prompts(&mut checked)?;
    Ok(checked)
}

/// Number of tool calls of a trained message that a tool result follows.
fn recorded_calls(pair: &[Message]) -> usize {
    match pair {
        [call, result] if call.is_trained_on() && result.role == Role::Tool => call.tool_calls().len(),
        _ => 0,
    }
}

fn empty_mask_reason(
    template: &ChatTemplate,
    conversation: &Conversation,
    supervised: &Supervised,
) -> String {
    if conversation.messages.iter().all(|message| message.role != Role::Assistant) {
        return "no assistant speaks".into();
    }
    match template.markers() {
        _ if !supervised.text_ranges.is_empty()
            && supervised.untruncated_len > supervised.input_ids.len() =>
        {
            format!(
                "the conversation is cut at {} tokens, before the first answer",
                supervised.input_ids.len()
            )
        }
        _ if !conversation.messages.iter().any(Message::is_trained_on) => "every answer has weight 0".into(),
        _ if !supervised.text_ranges.is_empty() => "the answers have no text".into(),
        Some(markers) => format!(
            "the rendered text has no {:?}; the rules `{}` are not those of this template",
            markers.assistant_header, template.name
        ),
        None => "the template marks nothing by {% generation %} in this conversation".into(),
    }
}

/// Compares each supervised span with its assistant message.
fn check_answer_texts(
    tokenizer: &ChatTokenizer,
    template: &ChatTemplate,
    conversation: &Conversation,
    supervised: &Supervised,
    checked: &mut RowFindings,
) {
    let messages = &conversation.messages;
    let messages_of_ranges = messages_of_ranges(&supervised.text, &supervised.text_ranges, messages);
    for (&(start, end), owner) in supervised.text_ranges.iter().zip(&messages_of_ranges) {
        let span_text = &supervised.text[start..end];
        if start == end && owner.is_none_or(|owner| !messages[owner].is_trained_on()) {
            continue;
        }
        let Some(index) = *owner else {
            let why = stray_text_reason(template, messages);
            checked.problems.push(Problem::Stray { found: excerpt(span_text, 0), why });
            break;
        };
        if let Some(problem) =
            check_supervised_span(tokenizer, template, &messages[index], index, span_text, checked)
        {
            checked.problems.push(problem);
            break;
        }
    }
    let mut assistants = (0..messages.len()).filter(|&index| messages[index].is_trained_on());
    if let Some(index) = assistants.find(|index| !messages_of_ranges.contains(&Some(*index))) {
        checked.problems.push(Problem::Missing { index });
    }
}

fn stray_text_reason(template: &ChatTemplate, messages: &[Message]) -> String {
    let Some(markers) = template.markers() else { return "the template marks it by {% generation %}".into() };
    let header = markers.assistant_header.as_str();
    let holds = |message: &Message| message.role != Role::Assistant && message.content.contains(header);
    match messages.iter().position(holds) {
        Some(index) => {
            format!("conversations[{index}], the {}'s, holds the assistant's header", messages[index].role)
        }
        None => format!("the template writes {header:?} before something else, or rewrites the answer"),
    }
}

/// Compares a supervised span with its message, ignoring white space around both.
fn check_supervised_span(
    tokenizer: &ChatTokenizer,
    template: &ChatTemplate,
    message: &Message,
    index: usize,
    span_text: &str,
    checked: &mut RowFindings,
) -> Option<Problem> {
    let prefix =
        template.markers().and_then(|markers| markers.assistant_prefix.as_deref()).unwrap_or_default();
    let content = message.content.strip_prefix(prefix).unwrap_or(&message.content);
    let (inline, answer) = reasoning::split_reasoning(content);
    let reasoning = message.reasoning_content.as_deref().map_or(inline, str::trim);
    let (thought, written) = reasoning::split_reasoning(strip_end_of_turn(tokenizer, template, span_text));
    let (answer, written) = (answer.trim(), written.trim());
    if message.is_truncated() && answer.is_empty() && span_text.trim_end().ends_with(reasoning) {
        return None; // The answer was cut within its reasoning, where the mask ends.
    }
    let is_left_out = thought.is_empty() && !reasoning.is_empty() && !written.contains(reasoning);
    checked.reasoning_left_out += usize::from(is_left_out);

    let calls = message.tool_calls();
    if !calls.is_empty() && written.is_empty() && answer.is_empty() {
        checked.calls_left_out += 1;
        return None;
    }
    let same = match calls {
        [] => written == answer,
        calls => {
            let count = written_calls(calls, written, [reasoning, answer]);
            if count < calls.len() && calls.len() > 1 {
                return Some(Problem::Calls { index, written: count, calls: calls.len() });
            }
            count == calls.len() && written.contains(answer)
        }
    };
    let (part, said, found) = if !same {
        ("answer", answer, written)
    } else if !thought.is_empty() && thought != reasoning {
        ("thoughts", reasoning, thought)
    } else {
        return None;
    };
    let at = said.chars().zip(found.chars()).take_while(|(a, b)| a == b).count();
    Some(Problem::Rewritten { index, part, said: excerpt(said, at), found: excerpt(found, at), at })
}

/// Number of calls whose function is named in `written`, once for each. Names within the message's own
/// `texts` do not count, unless such a text is part of a call.
fn written_calls(calls: &[Value], written: &str, texts: [&str; 2]) -> usize {
    let is_in_call = |text: &str| calls.iter().any(|call| call.to_string().contains(text));
    let mut rest = written.to_string();
    for text in texts.into_iter().filter(|text| !is_in_call(text)) {
        rest = rest.replacen(text, "", 1);
    }
    let name = |call: &Value| call.get("function").unwrap_or(call).get("name")?.as_str().map(str::to_owned);
    let is_written = |&place: &usize| {
        name(&calls[place]).is_none_or(|own| {
            let earlier = calls[..place].iter().filter(|call| name(call).as_ref() == Some(&own)).count();
            count_words(&rest, &own) > earlier
        })
    };
    (0..calls.len()).filter(is_written).count()
}

/// How often `name` is in the text, other than as a part of a longer name.
fn count_words(text: &str, name: &str) -> usize {
    let is_of_name = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
    let is_whole = |&(start, _): &(usize, &str)| {
        let (before, after) = (&text[..start], &text[start + name.len()..]);
        !before.ends_with(is_of_name) && !after.starts_with(is_of_name)
    };
    text.match_indices(name).filter(is_whole).count()
}

/// The text around character `at`.
fn excerpt(text: &str, at: usize) -> String {
    let start = at.saturating_sub(EXCERPT_CHARS);
    let mut shown: String = text.chars().skip(start).take(at - start + EXCERPT_CHARS).collect();
    if text.chars().nth(at + EXCERPT_CHARS).is_some() {
        shown.push('…');
    }
    if start > 0 { format!("…{shown}") } else { shown }
}
