//! Mask rules: how the assistant's words are found in a rendered conversation.

use std::borrow::Cow;

use deepspec_core::digest::Hasher;
use deepspec_core::recipe::{GENERATION, TemplateEntry};

use crate::conversation::Conversation;
use crate::error::TextError;
use crate::message::{Message, Role};
use crate::prompt::with_system;
use crate::template::RenderOptions;
use crate::tokenizer::ChatTokenizer;

/// The mask rules of a chat format, and what is added to its conversations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatTemplate {
    /// The name by which configs and caches refer to it.
    pub name: String,
    /// How the assistant's words are found.
    pub rule: MaskRule,
    /// The system message of conversations that have none.
    pub default_system: Option<String>,
}

/// How the assistant's words are found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MaskRule {
    /// By the text around them.
    Marks(Marks),
    /// By the template's own `{% generation %}` tags.
    Generation,
}

/// The text around the assistant's words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marks {
    /// The text right before them.
    pub assistant_header: String,
    /// The text that ends a turn; it is supervised too.
    pub end_of_turn: String,
    /// Put before them, and not supervised.
    pub assistant_prefix: Option<String>,
}

impl ChatTemplate {
    /// The template that configs call `name`.
    pub fn named(name: &str) -> Option<Self> {
        let (assistant_header, end_of_turn, default_system, assistant_prefix) = match name {
            "qwen" => ("<|im_start|>assistant\n", "<|im_end|>\n", Some("You are a helpful assistant."), None),
            "gemma4" => ("<|turn>model\n", "<turn|>\n", None, Some("<|channel>thought\n<channel|>")),
            GENERATION => {
                return Some(Self { name: name.into(), rule: MaskRule::Generation, default_system: None });
            }
            _ => return None,
        };
        let rule = MaskRule::Marks(Marks {
            assistant_header: assistant_header.into(),
            end_of_turn: end_of_turn.into(),
            assistant_prefix: assistant_prefix.map(Into::into),
        });
        Some(Self { name: name.into(), rule, default_system: default_system.map(Into::into) })
    }

    /// Every name that [`ChatTemplate::named`] knows.
    pub fn names() -> &'static [&'static str] {
        &["qwen", "gemma4", GENERATION]
    }

    /// The built-in rules whose marks occur in what the tokenizer's template writes, else the template's own tags if it
    /// has them.
    pub fn guess(tokenizer: &ChatTokenizer) -> Option<Self> {
        let probe = [Message::new(Role::User, "Hi"), Message::new(Role::Assistant, "Hello")];
        let text = tokenizer.render(&probe, &RenderOptions::default()).unwrap_or_default();
        let fits = |template: &Self| match &template.rule {
            MaskRule::Marks(marks) => {
                text.contains(&marks.assistant_header) && text.contains(&marks.end_of_turn)
            }
            MaskRule::Generation => tokenizer.has_generation_tags(),
        };
        Self::names().iter().filter_map(|name| Self::named(name)).find(fits)
    }

    /// The marks, unless the template's own tags are the rule.
    pub fn marks(&self) -> Option<&Marks> {
        match &self.rule {
            MaskRule::Marks(marks) => Some(marks),
            MaskRule::Generation => None,
        }
    }

    /// Checks that `tokenizer` has what the rules need: tags in its template, if they are the rule.
    ///
    /// # Errors
    /// If it has none.
    pub fn check_fits(&self, tokenizer: &ChatTokenizer) -> Result<(), TextError> {
        match self.rule {
            MaskRule::Generation => tokenizer.require_generation_tags(),
            MaskRule::Marks(_) => Ok(()),
        }
    }

    /// A digest of what `tokenizer` writes and what these rules see in it, apart from the system message. For the
    /// built-in marks it is the digest of the writing alone, which their name completes.
    pub fn digest(&self, tokenizer: &ChatTokenizer) -> String {
        let written = tokenizer.template_digest();
        let marks = match &self.rule {
            MaskRule::Marks(_) if Self::named(&self.name).is_some_and(|own| own.rule == self.rule) => {
                return written;
            }
            MaskRule::Marks(marks) => marks,
            MaskRule::Generation => return tokenizer.generation_digest(),
        };
        let mut hasher = Hasher::default();
        hasher.part(written.as_bytes()).part(marks.assistant_header.as_bytes());
        hasher.part(marks.end_of_turn.as_bytes());
        if let Some(prefix) = &marks.assistant_prefix {
            hasher.part(prefix.as_bytes());
        }
        hasher.hex()
    }

    /// The conversation with the default system message, unless it has one of its own.
    pub fn with_system(&self, conversation: &[Message]) -> Vec<Message> {
        with_system(conversation, self.default_system.as_deref())
    }

    /// The rules for this conversation: what was served opens as it was served, without a system message that its row does not have.
    pub(crate) fn of(&self, conversation: &Conversation) -> Cow<'_, Self> {
        match self.default_system.is_some() && conversation.was_served() {
            true => Cow::Owned(Self { default_system: None, ..self.clone() }),
            false => Cow::Borrowed(self),
        }
    }

    /// The conversation with the default system message and the assistant's prefix.
    pub(crate) fn complete(&self, conversation: &[Message]) -> Vec<Message> {
        let mut messages = self.with_system(conversation);
        if let Some(prefix) = self.marks().and_then(|marks| marks.assistant_prefix.as_deref()) {
            for message in messages.iter_mut().filter(|message| message.role == Role::Assistant) {
                if !message.content.starts_with(prefix) {
                    message.content.insert_str(0, prefix);
                }
            }
        }
        messages
    }
}

impl From<TemplateEntry> for ChatTemplate {
    fn from(entry: TemplateEntry) -> Self {
        let TemplateEntry { name, assistant_header, end_of_turn, default_system, assistant_prefix } = entry;
        let rule = MaskRule::Marks(Marks { assistant_header, end_of_turn, assistant_prefix });
        Self { name, rule, default_system: default_system.filter(|system| !system.is_empty()) }
    }
}

impl Marks {
    /// Byte ranges of `text` from behind each header to behind the next end of turn, or to the end of the text. A
    /// header that a user typed counts as well: the reference does not look at roles.
    pub(crate) fn find(&self, text: &str) -> Vec<(usize, usize)> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges<'a>(name: &str, text: &'a str) -> Vec<&'a str> {
        let template = ChatTemplate::named(name).unwrap();
        template.marks().unwrap().find(text).into_iter().map(|(start, end)| &text[start..end]).collect()
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
    fn every_name_is_known() {
        for name in ChatTemplate::names() {
            assert_eq!(ChatTemplate::named(name).unwrap().name, *name);
        }
        assert_eq!(ChatTemplate::named("llama"), None);
    }
}
