//! Mask rules: how to find the assistant's text in a rendered conversation.

use std::borrow::Cow;

use deepspec_core::digest::Hasher;
use deepspec_core::recipe::{GENERATION_RULES, TemplateEntry};

use crate::conversation::Conversation;
use crate::error::TextError;
use crate::message::{Message, Role};
use crate::prompt::with_system;
use crate::template::RenderOptions;
use crate::tokenizer::ChatTokenizer;

/// The mask rule of a chat format, and its default system message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatTemplate {
    /// The name in configs and caches.
    pub name: String,
    /// How to find the assistant's text.
    pub rule: MaskRule,
    /// The system message of conversations without one.
    pub default_system: Option<String>,
}

/// How to find the assistant's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MaskRule {
    /// By the markers around it.
    Markers(TurnMarkers),
    /// The `{% generation %}` tags of the template mark what is supervised.
    Generation,
}

/// The markers around the assistant's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TurnMarkers {
    /// The text right before it.
    pub assistant_header: String,
    /// The end of a turn, which is supervised too.
    pub end_of_turn: String,
    /// A prefix of the assistant's text that is not supervised.
    pub assistant_prefix: Option<String>,
    /// The marks of channels. None if a turn is a single message.
    pub channels: Option<Channels>,
}

/// Marks of a format whose assistant writes several messages in a turn, each in a channel: reasoning, tool calls and the
/// answer. The header precedes each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Channels {
    /// Ends a message. The assistant may write another one in the same turn.
    pub end_of_message: &'static str,
    /// Ends a turn with a tool call.
    pub end_of_call: &'static str,
    /// Stands between the header and the answer.
    pub answer_header: &'static str,
}

impl ChatTemplate {
    /// Finds the rule that a config names: one of `formats`, or the `{% generation %}` tags of the
    /// template.
    pub fn from_name(name: &str, formats: &[&ChatFormat]) -> Option<Self> {
        if name == GENERATION_RULES {
            return Some(Self { name: name.into(), rule: MaskRule::Generation, default_system: None });
        }
        formats.iter().find(|format| format.name == name).map(|&format| format.into())
    }

    /// Every name that [`ChatTemplate::from_name`] knows.
    pub fn known_names<'a>(formats: &[&'a ChatFormat]) -> Vec<&'a str> {
        formats.iter().map(|format| format.name).chain([GENERATION_RULES]).collect()
    }

    /// Finds the format whose markers occur in the tokenizer's rendering. Otherwise uses the
    /// template's `{% generation %}` tags. None if the template has no tags.
    pub fn guess(tokenizer: &ChatTokenizer, formats: &[&ChatFormat]) -> Option<Self> {
        let probe = [Message::new(Role::User, "Hi"), Message::new(Role::Assistant, "Hello")];
        let text = tokenizer.render(&probe, &RenderOptions::default()).unwrap_or_default();
        let fits = |template: &Self| match &template.rule {
            MaskRule::Markers(markers) => {
                text.contains(&markers.assistant_header) && text.contains(&markers.end_of_turn)
            }
            MaskRule::Generation => tokenizer.has_generation_tags(),
        };
        Self::known_names(formats).into_iter().filter_map(|name| Self::from_name(name, formats)).find(fits)
    }

    /// The markers of turns. None if the rule is the template's tags.
    pub fn markers(&self) -> Option<&TurnMarkers> {
        match &self.rule {
            MaskRule::Markers(markers) => Some(markers),
            MaskRule::Generation => None,
        }
    }

    /// If the rule is the template's tags, checks that the template of `tokenizer` has them.
    ///
    /// # Errors
    /// If the template has no tags.
    pub fn check_fits(&self, tokenizer: &ChatTokenizer) -> Result<(), TextError> {
        match self.rule {
            MaskRule::Generation => tokenizer.require_generation_tags(),
            MaskRule::Markers(_) => Ok(()),
        }
    }

    /// A digest of the template's renderings and of the mask rule, without the system message. For
    /// a rule of `formats` the digest covers the renderings only; the format's name identifies the
    /// rule.
    pub fn digest(&self, tokenizer: &ChatTokenizer, formats: &[&ChatFormat]) -> String {
        let written = tokenizer.template_digest();
        let markers = match &self.rule {
            MaskRule::Markers(_)
                if Self::from_name(&self.name, formats).is_some_and(|own| own.rule == self.rule) =>
            {
                return written;
            }
            MaskRule::Markers(markers) => markers,
            MaskRule::Generation => return tokenizer.generation_digest(),
        };
        let mut hasher = Hasher::default();
        hasher.update_part(written.as_bytes()).update_part(markers.assistant_header.as_bytes());
        hasher.update_part(markers.end_of_turn.as_bytes());
        if let Some(prefix) = &markers.assistant_prefix {
            hasher.update_part(prefix.as_bytes());
        }
        hasher.hex_digest()
    }

    /// Puts the default system message before the conversation, unless the conversation has a
    /// system message.
    pub fn with_system(&self, conversation: &[Message]) -> Vec<Message> {
        with_system(conversation, self.default_system.as_deref())
    }

    /// The rules for this conversation. A conversation with served ids gets no default system
    /// message, because its prompt had none.
    pub(crate) fn for_conversation(&self, conversation: &Conversation) -> Cow<'_, Self> {
        match self.default_system.is_some() && conversation.has_served_ids() {
            true => Cow::Owned(Self { default_system: None, ..self.clone() }),
            false => Cow::Borrowed(self),
        }
    }

    /// The conversation with the default system message and the assistant's prefix.
    pub(crate) fn with_system_and_prefix(&self, conversation: &[Message]) -> Vec<Message> {
        let mut messages = self.with_system(conversation);
        if let Some(prefix) = self.markers().and_then(|markers| markers.assistant_prefix.as_deref()) {
            for message in messages.iter_mut().filter(|message| message.role == Role::Assistant) {
                if !message.content.starts_with(prefix) {
                    message.content.insert_str(0, prefix);
                }
            }
        }
        messages
    }
}

/// A named chat format that several models share.
#[derive(Debug, PartialEq, Eq)]
pub struct ChatFormat {
    /// Name of the format.
    pub name: &'static str,
    /// The text right before the assistant's text.
    pub assistant_header: &'static str,
    /// The end of a turn, which is supervised too.
    pub end_of_turn: &'static str,
    /// The system message of conversations without one.
    pub default_system: Option<&'static str>,
    /// A prefix of the assistant's text that is not supervised.
    pub assistant_prefix: Option<&'static str>,
    /// The marks of channels. None if a turn is a single message.
    pub channels: Option<Channels>,
}

impl From<&ChatFormat> for ChatTemplate {
    fn from(format: &ChatFormat) -> Self {
        let rule = MaskRule::Markers(TurnMarkers {
            assistant_header: format.assistant_header.into(),
            end_of_turn: format.end_of_turn.into(),
            assistant_prefix: format.assistant_prefix.map(Into::into),
            channels: format.channels,
        });
        Self { name: format.name.into(), rule, default_system: format.default_system.map(Into::into) }
    }
}

impl From<TemplateEntry> for ChatTemplate {
    fn from(entry: TemplateEntry) -> Self {
        let TemplateEntry { name, assistant_header, end_of_turn, default_system, assistant_prefix } = entry;
        let rule = MaskRule::Markers(TurnMarkers {
            assistant_header,
            end_of_turn,
            assistant_prefix,
            channels: None,
        });
        Self { name, rule, default_system: default_system.filter(|system| !system.is_empty()) }
    }
}

impl TurnMarkers {
    /// Byte ranges of the assistant's text. Each range begins after a header and includes the next
    /// end of turn. If there is no end of turn, it ends with the text. A header that a user typed
    /// counts too, because the reference ignores roles. All messages of a turn are one range, with
    /// the headers between them, which the model generates.
    pub(crate) fn assistant_spans(&self, text: &str) -> Vec<(usize, usize)> {
        let (mut ranges, mut searched) = (Vec::new(), 0);
        while let Some(header) = text[searched..].find(&self.assistant_header) {
            let mut start = searched + header + self.assistant_header.len();
            if let Some(prefix) =
                self.assistant_prefix.as_deref().filter(|&prefix| text[start..].starts_with(prefix))
            {
                start += prefix.len();
            }
            let mut end = self.find_end(text, start);
            while self.goes_on(&text[start..end], &text[end..]) {
                end = self.find_end(text, end + self.assistant_header.len());
            }
            ranges.push((start, end));
            searched = end;
        }
        ranges
    }

    /// Where the message that begins at `start` ends, with its end mark.
    fn find_end(&self, text: &str, start: usize) -> usize {
        let ends = self.ends().filter_map(|end| Some((text[start..].find(end)?, end)));
        ends.min_by_key(|(at, _)| *at).map_or(text.len(), |(at, end)| start + at + end.len())
    }

    /// Whether the turn goes on with another message.
    fn goes_on(&self, turn: &str, rest: &str) -> bool {
        self.channels.is_some_and(|channels| turn.ends_with(channels.end_of_message))
            && rest.starts_with(&self.assistant_header)
    }

    /// The marks that end a message.
    fn ends(&self) -> impl Iterator<Item = &str> {
        let others = self.channels.map(|channels| [channels.end_of_call, channels.end_of_message]);
        [self.end_of_turn.as_str()].into_iter().chain(others.into_iter().flatten())
    }

    /// A supervised span without its end mark.
    pub(crate) fn strip_end<'a>(&self, span: &'a str) -> &'a str {
        self.ends().find_map(|end| span.strip_suffix(end)).unwrap_or(span)
    }

    /// A supervised span without its end mark and, if it has no message before the answer, without the header of the
    /// answer.
    pub(crate) fn strip_marks<'a>(&self, span: &'a str) -> &'a str {
        let span = self.strip_end(span);
        let header = self.channels.map_or("", |channels| channels.answer_header);
        span.strip_prefix(header).unwrap_or(span)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges<'a>(markers: &TurnMarkers, text: &'a str) -> Vec<&'a str> {
        markers.assistant_spans(text).into_iter().map(|(start, end)| &text[start..end]).collect()
    }

    #[test]
    fn supervision_runs_from_header_to_end_of_turn() {
        let (h, e) = ("<|im_start|>assistant\n", "<|im_end|>\n");
        let qwen = TurnMarkers {
            assistant_header: h.into(),
            end_of_turn: e.into(),
            assistant_prefix: None,
            channels: None,
        };
        assert_eq!(
            ranges(&qwen, &format!("{h}a{e}b{e}{h}c{h}d{e}")),
            ["a<|im_end|>\n", &format!("c{h}d{e}")]
        );
        assert_eq!(ranges(&qwen, &format!("{h}cut short<|im_end|>")), ["cut short<|im_end|>"]);
        assert_eq!(ranges(&qwen, h), [""]);
        assert!(ranges(&qwen, "nothing").is_empty());
        let gemma = TurnMarkers {
            assistant_header: "<|turn>model\n".into(),
            end_of_turn: "<turn|>\n".into(),
            assistant_prefix: Some("<|channel>thought\n<channel|>".into()),
            channels: None,
        };
        let text = "<|turn>model\n<|channel>thought\n<channel|>a<turn|>\n<|turn>model\nb<turn|>\n";
        assert_eq!(ranges(&gemma, text), ["a<turn|>\n", "b<turn|>\n"]);
    }

    #[test]
    fn messages_of_a_turn_are_one_span() {
        let channels = Channels { end_of_message: "<e>", end_of_call: "<c>", answer_header: "<final>" };
        let (header, end) = ("<a>".into(), "<r>".into());
        let harmony = TurnMarkers {
            assistant_header: header,
            end_of_turn: end,
            assistant_prefix: None,
            channels: Some(channels),
        };
        let text = "<u>hi<e><a>x<e><a>f(1)<c><t>result<e><a>y<e><a><final>z<e><u>more<e><a><final>w<r>";
        assert_eq!(ranges(&harmony, text), ["x<e><a>f(1)<c>", "y<e><a><final>z<e>", "<final>w<r>"]);
        assert_eq!(ranges(&harmony, "<a>x<e><a>cut"), ["x<e><a>cut"]);
        assert_eq!(ranges(&harmony, "<a>f(1)<c><a>g(2)<c>"), ["f(1)<c>", "g(2)<c>"]);
        assert_eq!(harmony.strip_marks("<final>w<r>"), "w");
        assert_eq!(harmony.strip_marks("f(1)<c>"), "f(1)");
    }

    #[test]
    fn every_name_is_known() {
        let format = ChatFormat {
            name: "mine",
            assistant_header: "a",
            end_of_turn: "b",
            default_system: None,
            assistant_prefix: None,
            channels: None,
        };
        assert_eq!(ChatTemplate::known_names(&[&format]), ["mine", GENERATION_RULES]);
        for name in ChatTemplate::known_names(&[&format]) {
            assert_eq!(ChatTemplate::from_name(name, &[&format]).unwrap().name, name);
        }
        assert_eq!(ChatTemplate::from_name("llama", &[&format]), None);
    }
}
