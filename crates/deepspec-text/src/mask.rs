//! The loss mask: the tokens of a conversation on which a drafter trains.

use crate::conversation::Conversation;
use crate::error::TextError;
use crate::message::{Message, Role};
use crate::prefixes::PrefixTokenCounts;
use crate::reasoning;
use crate::records::check_starts_with_user;
use crate::rules::{ChatTemplate, MaskRule, TurnMarkers};
use crate::template::RenderOptions;
use crate::tokenizer::{ChatTokenizer, Encoded};

/// Conversations with fewer supervised tokens are not used for training.
pub const MIN_SUPERVISED_TOKENS: usize = 14;

/// A tokenised conversation with its loss mask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Supervised {
    /// The rendered conversation.
    pub text: String,
    /// Byte ranges of the supervised text, in order, before truncation to the maximal length.
    pub text_ranges: Vec<(usize, usize)>,
    /// The token ids, truncated to the maximal length.
    pub input_ids: Vec<i64>,
    /// For each id, whether a drafter trains on it.
    pub loss_mask: Vec<bool>,
    /// Number of ids before truncation.
    pub untruncated_len: usize,
    /// Whether the ids are the ids that the server generated.
    pub served: Served,
}

/// Whether the ids come from the server or from tokenising the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Served {
    /// The ids come from tokenising the text. The row does not keep served ids.
    #[default]
    Unknown,
    /// The ids come from the server. Tokenising the text gives the same ids.
    SameAsText,
    /// The ids come from the server. Tokenising the text gives other ids.
    DiffersFromText,
}

impl Supervised {
    /// Number of supervised tokens.
    pub fn supervised_count(&self) -> usize {
        self.loss_mask.iter().filter(|&&supervised| supervised).count()
    }

    /// The supervised ranges of the mask, half-open.
    pub fn spans(&self) -> Vec<(u32, u32)> {
        let mut spans = Vec::new();
        let mut at = 0;
        for run in self.loss_mask.chunk_by(|a, b| a == b) {
            let end = at + run.len() as u32;
            if run[0] {
                spans.push((at, end));
            }
            at = end;
        }
        spans
    }
}

/// Renders, tokenises and masks a conversation; keeps the first `max_length` tokens. If the row has
/// the served token ids of its last answer, they replace the ids of the text.
/// A truncated answer is supervised up to its last word, because the model did not generate the end
/// of turn. The reference supervises that end of turn if a row has no `finish_reason`. Empty
/// answers and messages with `weight` 0 are not supervised.
///
/// # Errors
/// If the conversation does not start with the user, the template refuses it or lacks the tags of
/// its rule, or the tokenizer fails.
pub fn supervise(
    tokenizer: &ChatTokenizer,
    template: &ChatTemplate,
    conversation: &Conversation,
    max_length: usize,
) -> Result<Supervised, TextError> {
    check_starts_with_user(&conversation.messages)?;
    let template = &*template.for_conversation(conversation);
    let messages = template.with_system_and_prefix(&conversation.messages);
    let options = RenderOptions { tools: conversation.tools.clone(), ..RenderOptions::default() };
    let supervised = match &template.rule {
        MaskRule::Markers(markers) => {
            if markers.assistant_header.is_empty() || markers.end_of_turn.is_empty() {
                return Err(TextError::EmptyMark { name: template.name.clone() });
            }
            let text = tokenizer.render(&messages, &options)?;
            let mut text_ranges = markers.assistant_spans(&text);
            empty_untrained_spans(&text, &mut text_ranges, &conversation.messages);
            trim_truncated_answers(&text, &mut text_ranges, &conversation.messages, Some(markers));
            empty_blank_spans(tokenizer, template, &text, &mut text_ranges);
            mask_by_prefixes(tokenizer, text, text_ranges, max_length)
        }
        MaskRule::Generation => {
            let (text, mut text_ranges) = tokenizer.render_generations(&messages, &options)?;
            empty_untrained_spans(&text, &mut text_ranges, &conversation.messages);
            trim_truncated_answers(&text, &mut text_ranges, &conversation.messages, None);
            empty_blank_spans(tokenizer, template, &text, &mut text_ranges);
            mask_by_offsets(tokenizer, text, text_ranges, max_length)
        }
    }?;
    supervised.with_served_ids(tokenizer, template, conversation, max_length)
}

/// Empties the spans of messages whose `weight` is 0.
fn empty_untrained_spans(text: &str, text_ranges: &mut [(usize, usize)], messages: &[Message]) {
    if messages.iter().all(|message| message.role != Role::Assistant || message.is_trained_on()) {
        return;
    }
    let messages_of_ranges = messages_of_ranges(text, text_ranges, messages);
    for ((start, end), owner) in text_ranges.iter_mut().zip(messages_of_ranges) {
        if owner.is_some_and(|owner| !messages[owner].is_trained_on()) {
            *end = *start;
        }
    }
}

/// Longest answer, in bytes, that is checked for special tokens alone.
const MAX_EMPTY_ANSWER_BYTES: usize = 1024;

/// Empties spans without an answer, reasoning or tool calls. A lone end of turn, or special tokens
/// in place of an answer, are not worth learning.
fn empty_blank_spans(
    tokenizer: &ChatTokenizer,
    template: &ChatTemplate,
    text: &str,
    text_ranges: &mut [(usize, usize)],
) {
    for (start, end) in text_ranges {
        let answer = strip_end_of_turn(tokenizer, template, &text[*start..*end]);
        if answer.len() <= MAX_EMPTY_ANSWER_BYTES
            && reasoning::is_empty_answer(&tokenizer.remove_special_tokens(answer))
        {
            *end = *start;
        }
    }
}

/// A supervised span without its end-of-turn tokens, and without other marks around the answer.
pub(crate) fn strip_end_of_turn<'a>(
    tokenizer: &ChatTokenizer,
    template: &ChatTemplate,
    place: &'a str,
) -> &'a str {
    if let Some(markers) = template.markers() {
        return markers.strip_marks(place);
    }
    // The tags may enclose the end of turn, which is then a special token.
    tokenizer.trim_special_tokens(place)
}

/// Ends the spans of truncated answers where the text that the model generated ends.
fn trim_truncated_answers(
    text: &str,
    text_ranges: &mut [(usize, usize)],
    messages: &[Message],
    markers: Option<&TurnMarkers>,
) {
    if !messages.iter().any(Message::is_truncated) {
        return;
    }
    let messages_of_ranges = messages_of_ranges(text, text_ranges, messages);
    for ((start, end), owner) in text_ranges.iter_mut().zip(messages_of_ranges) {
        let Some(message) = owner.map(|owner| &messages[owner]).filter(|message| message.is_truncated())
        else {
            continue;
        };
        let said = &text[*start..*end];
        let reasoning = message.reasoning_content.as_deref().unwrap_or_default();
        let last = if message.content.trim().is_empty() { reasoning } else { &message.content };
        let found = [last, last.trim()]
            .into_iter()
            .find_map(|last| said.rfind(last).filter(|_| !last.is_empty()).map(|at| at + last.len()));
        let without_mark = markers.map_or(said, |markers| markers.strip_end(said)).len();
        *end = *start + found.unwrap_or(without_mark);
    }
}

/// The index of each supervised span's message. None if the span has no assistant message, such as
/// a header that a user typed. Spans and messages are in the same order.
pub(crate) fn messages_of_ranges(
    text: &str,
    text_ranges: &[(usize, usize)],
    messages: &[Message],
) -> Vec<Option<usize>> {
    let assistants: Vec<usize> =
        (0..messages.len()).filter(|&index| messages[index].role == Role::Assistant).collect();
    if text_ranges.len() == assistants.len() {
        return assistants.into_iter().map(Some).collect();
    }
    let mut rest = assistants.as_slice();
    let mut owner = |&(start, end): &(usize, usize)| {
        let said = &text[start..end];
        let fits = |&index: &usize| said.contains(answer_text(&messages[index].content));
        let at = rest.iter().position(fits)?;
        let index = rest[at];
        rest = &rest[at + 1..];
        Some(index)
    };
    text_ranges.iter().map(&mut owner).collect()
}

/// The answer of a message, without reasoning and white space around it.
fn answer_text(content: &str) -> &str {
    reasoning::split_reasoning(content).1.trim()
}

/// Builds the mask by counting the tokens of each prefix of the text, tokenised alone. Tokens that
/// merge across a border make this differ from an offset map; the reference counts this way
/// (docs/architecture.md, Loss mask).
fn mask_by_prefixes(
    tokenizer: &ChatTokenizer,
    text: String,
    text_ranges: Vec<(usize, usize)>,
    max_length: usize,
) -> Result<Supervised, TextError> {
    let prefixes = PrefixTokenCounts::new(tokenizer, &text)?;
    let untruncated_len = prefixes.ids().len();
    let input_ids = prefixes.ids()[..untruncated_len.min(max_length)].to_vec();
    let mut loss_mask = vec![false; input_ids.len()];
    for &(start, end) in text_ranges.iter().filter(|(start, end)| start < end) {
        let start = prefixes.count_tokens(start)?;
        if start >= input_ids.len() {
            break;
        }
        // A token may span both borders. Then the end's token count is below the start's, and the
        // range supervises nothing.
        let end = prefixes.count_tokens(end)?.clamp(start, input_ids.len());
        loss_mask[start..end].fill(true);
    }
    Ok(Supervised { text, text_ranges, input_ids, loss_mask, untruncated_len, served: Served::Unknown })
}

/// Builds the mask of a template's tags as transformers does. A range's mask begins at the token of
/// its first character and ends at the first token of its last character. Some tokenizers leave
/// white space out of their offsets. If a border has no token, the mask begins or ends at the next
/// token inside the range. In this case transformers masks either the whole text or nothing.
fn mask_by_offsets(
    tokenizer: &ChatTokenizer,
    text: String,
    text_ranges: Vec<(usize, usize)>,
    max_length: usize,
) -> Result<Supervised, TextError> {
    let Encoded { ids: mut input_ids, offsets, .. } = tokenizer.encode_with_offsets(&text)?;
    let untruncated_len = input_ids.len();
    input_ids.truncate(max_length);
    let mut loss_mask = vec![false; untruncated_len];
    for &(start, end) in &text_ranges {
        let last = text[start..end].chars().next_back().map_or(start, |last| end - last.len_utf8());
        let first_token = offsets.partition_point(|&(_, token_end)| token_end <= start);
        let last_token = offsets.partition_point(|&(_, token_end)| token_end <= last);
        let holds = offsets.get(last_token).is_some_and(|&(token_start, _)| token_start <= last);
        let behind = if holds { last_token + 1 } else { last_token };
        if start < end && first_token < behind {
            loss_mask[first_token..behind].fill(true);
        }
    }
    loss_mask.truncate(max_length);
    Ok(Supervised { text, text_ranges, input_ids, loss_mask, untruncated_len, served: Served::Unknown })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn spans_say_what_the_mask_says(loss_mask in prop::collection::vec(any::<bool>(), 0..60)) {
            let supervised = Supervised { text: String::new(), text_ranges: vec![], input_ids: vec![], loss_mask: loss_mask.clone(), untruncated_len: 0, served: Served::Unknown };
            let spans = supervised.spans();
            let mut rebuilt = vec![false; loss_mask.len()];
            for &(start, end) in &spans { rebuilt[start as usize..end as usize].fill(true); }
            prop_assert_eq!(rebuilt, loss_mask);
            prop_assert!(spans.windows(2).all(|pair| pair[0].1 < pair[1].0));
            prop_assert_eq!(spans.iter().map(|(a, b)| (b - a) as usize).sum::<usize>(), supervised.supervised_count());
        }
    }
}
