//! The loss mask: which tokens of a conversation a drafter learns from.

use serde::{Deserialize, Serialize};

use crate::error::TextError;
use crate::message::{Message, Role, check_starts_with_user};
use crate::prompt::with_system;
use crate::template::RenderOptions;
use crate::tokenizer::ChatTokenizer;

/// Conversations with fewer supervised tokens are not worth a training sample.
pub const MIN_SUPERVISED_TOKENS: usize = 14;

/// How to find the assistant's words in a rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatTemplate {
    /// The name by which configs refer to it.
    pub name: String,
    /// The text right before the assistant's words.
    pub assistant_header: String,
    /// The text that ends a turn; it is supervised too.
    pub end_of_turn: String,
    /// The system message of conversations that have none.
    pub default_system: Option<String>,
    /// Put before the assistant's words, and not supervised.
    pub assistant_prefix: Option<String>,
}

impl ChatTemplate {
    /// The template that configs call `name`.
    pub fn named(name: &str) -> Option<Self> {
        let (assistant_header, end_of_turn, default_system, assistant_prefix) = match name {
            "qwen" => ("<|im_start|>assistant\n", "<|im_end|>\n", Some("You are a helpful assistant."), None),
            "gemma4" => ("<|turn>model\n", "<turn|>\n", None, Some("<|channel>thought\n<channel|>")),
            _ => return None,
        };
        Some(Self {
            name: name.into(),
            assistant_header: assistant_header.into(),
            end_of_turn: end_of_turn.into(),
            default_system: default_system.map(Into::into),
            assistant_prefix: assistant_prefix.map(Into::into),
        })
    }

    /// Every name that [`ChatTemplate::named`] knows.
    pub fn names() -> &'static [&'static str] {
        &["qwen", "gemma4"]
    }

    /// The conversation with the default system message and the assistant's prefix.
    fn complete(&self, conversation: &[Message]) -> Vec<Message> {
        let mut messages = with_system(conversation, self.default_system.as_deref());
        if let Some(prefix) = &self.assistant_prefix {
            for message in messages.iter_mut().filter(|message| message.role == Role::Assistant) {
                if !message.content.starts_with(prefix) {
                    message.content.insert_str(0, prefix);
                }
            }
        }
        messages
    }

    /// Byte ranges of `text` from behind each header to behind the next end of turn, or to the end of the text. A
    /// header that a user typed counts as well: the reference does not look at roles.
    fn supervised_bytes(&self, text: &str) -> Vec<(usize, usize)> {
        let (mut ranges, mut searched) = (Vec::new(), 0);
        while let Some(header) = text[searched..].find(&self.assistant_header) {
            let mut start = searched + header + self.assistant_header.len();
            if let Some(prefix) =
                self.assistant_prefix.as_deref().filter(|&prefix| text[start..].starts_with(prefix))
            {
                start += prefix.len();
            }
            let end = text[start..]
                .find(&self.end_of_turn)
                .map_or(text.len(), |end| start + end + self.end_of_turn.len());
            ranges.push((start, end));
            searched = end;
        }
        ranges
    }
}

/// A conversation ready for training.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Supervised {
    /// The whole rendered conversation.
    pub text: String,
    /// Its token ids, cut at the maximal length.
    pub input_ids: Vec<i64>,
    /// For each id, whether a drafter learns from it.
    pub loss_mask: Vec<bool>,
    /// How many ids there were before the cut.
    pub untruncated_len: usize,
}

impl Supervised {
    /// How many tokens are supervised.
    pub fn supervised_count(&self) -> usize {
        self.loss_mask.iter().filter(|&&supervised| supervised).count()
    }

    /// The supervised runs of the mask, half-open.
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

/// Renders, tokenises and masks a conversation; keeps the first `max_length` tokens.
///
/// # Errors
/// If the conversation does not start with the user, the template refuses it or the tokenizer fails.
pub fn supervise(
    tokenizer: &ChatTokenizer,
    template: &ChatTemplate,
    conversation: &[Message],
    max_length: usize,
) -> Result<Supervised, TextError> {
    if template.assistant_header.is_empty() || template.end_of_turn.is_empty() {
        return Err(TextError::EmptyMark { name: template.name.clone() });
    }
    check_starts_with_user(conversation)?;
    let text = tokenizer.render(&template.complete(conversation), &RenderOptions::default())?;
    let mut input_ids = tokenizer.encode(&text)?;
    let untruncated_len = input_ids.len();
    input_ids.truncate(max_length);

    // A border is the token count of the text before it, tokenised alone: where tokens merge across the border this
    // differs from an offset map, and the reference's rule is kept (SPEC §7).
    let border = |byte: usize| -> Result<usize, TextError> {
        let count = if byte == text.len() { untruncated_len } else { tokenizer.encode(&text[..byte])?.len() };
        Ok(count.min(input_ids.len()))
    };
    let mut loss_mask = vec![false; input_ids.len()];
    for (start, end) in template.supervised_bytes(&text) {
        let (start, end) = (border(start)?, border(end)?);
        // Merging may leave fewer tokens up to the end than up to the start: then nothing is supervised.
        loss_mask[start..end.max(start)].fill(true);
    }
    Ok(Supervised { text, input_ids, loss_mask, untruncated_len })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ranges<'a>(name: &str, text: &'a str) -> Vec<&'a str> {
        let template = ChatTemplate::named(name).unwrap();
        template.supervised_bytes(text).into_iter().map(|(start, end)| &text[start..end]).collect()
    }

    #[test]
    fn supervision_runs_from_header_to_end_of_turn() {
        let (h, e) = ("<|im_start|>assistant\n", "<|im_end|>\n");
        assert_eq!(
            ranges("qwen", &format!("{h}a{e}b{e}{h}c{h}d{e}")),
            ["a<|im_end|>\n", &format!("c{h}d{e}")]
        );
        assert_eq!(ranges("qwen", &format!("{h}cut short<|im_end|>")), ["cut short<|im_end|>"]);
        assert_eq!(ranges("qwen", h), [""]);
        assert!(ranges("qwen", "nothing").is_empty());
        let text = "<|turn>model\n<|channel>thought\n<channel|>a<turn|>\n<|turn>model\nb<turn|>\n";
        assert_eq!(ranges("gemma4", text), ["a<turn|>\n", "b<turn|>\n"]);
    }

    #[test]
    fn every_name_is_known_and_survives_json() {
        for name in ChatTemplate::names() {
            let template = ChatTemplate::named(name).unwrap();
            let json = serde_json::to_string(&template).unwrap();
            assert_eq!(serde_json::from_str::<ChatTemplate>(&json).unwrap(), template);
        }
        assert_eq!(ChatTemplate::named("llama"), None);
    }

    proptest! {
        #[test]
        fn spans_say_what_the_mask_says(loss_mask in prop::collection::vec(any::<bool>(), 0..60)) {
            let supervised = Supervised { text: String::new(), input_ids: vec![], loss_mask: loss_mask.clone(), untruncated_len: 0 };
            let spans = supervised.spans();
            let mut rebuilt = vec![false; loss_mask.len()];
            for &(start, end) in &spans { rebuilt[start as usize..end as usize].fill(true); }
            prop_assert_eq!(rebuilt, loss_mask);
            prop_assert!(spans.windows(2).all(|pair| pair[0].1 < pair[1].0));
            prop_assert_eq!(spans.iter().map(|(a, b)| (b - a) as usize).sum::<usize>(), supervised.supervised_count());
        }
    }
}
