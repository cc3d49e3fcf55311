//! Separates a model's reasoning, such as `<think>…</think>`, from its answer.

use deepspec_text::{THINK_TAGS, ThinkTags};

use crate::stop::partial_match_len;

/// A piece of an answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AnswerDelta {
    /// Text of the answer.
    pub content: String,
    /// Text of the reasoning.
    pub reasoning: String,
}

impl AnswerDelta {
    /// Whether both texts are empty.
    pub fn is_empty(&self) -> bool {
        self.content.is_empty() && self.reasoning.is_empty()
    }

    /// Appends a later piece.
    pub fn extend(&mut self, later: &Self) {
        self.content.push_str(&later.content);
        self.reasoning.push_str(&later.reasoning);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ParserState {
    /// Only white space or part of an opening tag so far.
    Undecided,
    /// After the opening tag, and possibly part of its label.
    Opened(&'static ThinkTags),
    /// After the opening tag and label, before the first character of the reasoning.
    Entered(&'static ThinkTags),
    Thinking(&'static ThinkTags),
    /// After the closing tag, before the first character of the answer.
    Closed,
    Answering,
}

/// Splits streamed text. Newlines around the tags belong neither to the reasoning nor to the answer, because chat
/// templates add and strip them.
pub struct ReasoningParser {
    state: ParserState,
    pending: String,
}

impl ReasoningParser {
    /// A parser for text after `prompt`, which may have opened the reasoning already.
    pub fn for_prompt(prompt: &str) -> Self {
        Self {
            state: ThinkTags::opened_by(prompt).map_or(ParserState::Undecided, ParserState::Entered),
            pending: String::new(),
        }
    }

    /// Processes the next piece.
    pub fn push(&mut self, piece: &str) -> AnswerDelta {
        self.pending.push_str(piece);
        let mut delta = AnswerDelta::default();
        while self.advance(&mut delta) {}
        delta
    }

    /// Returns the held-back text at the end of the stream.
    pub fn finish(&mut self) -> AnswerDelta {
        let pending = std::mem::take(&mut self.pending);
        match self.state {
            ParserState::Undecided | ParserState::Answering | ParserState::Closed => {
                AnswerDelta { content: pending, ..AnswerDelta::default() }
            }
            // Only part of the label: the reasoning did not begin.
            ParserState::Opened(_) => AnswerDelta::default(),
            ParserState::Entered(_) | ParserState::Thinking(_) => {
                AnswerDelta { reasoning: pending.trim_end_matches('\n').into(), ..AnswerDelta::default() }
            }
        }
    }

    /// Moves text out of `pending`. Returns true if the state changed, so that the rest is processed
    /// again.
    fn advance(&mut self, delta: &mut AnswerDelta) -> bool {
        match self.state {
            ParserState::Undecided => {
                let text = self.pending.trim_start();
                let opened = THINK_TAGS
                    .iter()
                    .find_map(|tags| Some((tags, text.strip_prefix(tags.open)?.to_string())));
                if let Some((tags, rest)) = opened {
                    self.pending = rest;
                    self.enter_state(ParserState::Opened(tags))
                } else if THINK_TAGS.iter().any(|tags| tags.open.starts_with(text)) {
                    false
                } else {
                    self.enter_state(ParserState::Answering)
                }
            }
            ParserState::Opened(tags) => {
                if let Some(rest) = self.pending.strip_prefix(tags.label) {
                    self.pending = rest.to_string();
                } else if tags.label.starts_with(&self.pending) {
                    return false;
                }
                self.enter_state(ParserState::Entered(tags))
            }
            ParserState::Entered(tags) => self.skip_newlines(ParserState::Thinking(tags)),
            ParserState::Closed => self.skip_newlines(ParserState::Answering),
            ParserState::Thinking(tags) => {
                if let Some((reasoning, rest)) = self.pending.split_once(tags.close) {
                    delta.reasoning.push_str(reasoning.trim_end_matches('\n'));
                    self.pending = rest.to_string();
                    return self.enter_state(ParserState::Closed);
                }
                let kept = self.pending.len() - partial_match_len(&self.pending, tags.close);
                let kept = self.pending[..kept].trim_end_matches('\n').len();
                delta.reasoning.extend(self.pending.drain(..kept));
                false
            }
            ParserState::Answering => {
                delta.content.push_str(&std::mem::take(&mut self.pending));
                false
            }
        }
    }

    fn skip_newlines(&mut self, next: ParserState) -> bool {
        self.pending = self.pending.trim_start_matches('\n').to_string();
        !self.pending.is_empty() && self.enter_state(next)
    }

    fn enter_state(&mut self, state: ParserState) -> bool {
        self.state = state;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(prompt: &str, text: &str, size: usize) -> (String, String) {
        let (mut parser, mut whole) = (ReasoningParser::for_prompt(prompt), AnswerDelta::default());
        let characters: Vec<char> = text.chars().collect();
        for piece in characters.chunks(size) {
            whole.extend(&parser.push(&piece.iter().collect::<String>()));
        }
        whole.extend(&parser.finish());
        (whole.reasoning, whole.content)
    }

    #[test]
    fn thoughts_and_answer_part_whatever_the_pieces() {
        let pair = |reasoning: &str, content: &str| (reasoning.to_string(), content.to_string());
        for size in 1..20 {
            assert_eq!(
                split("assistant\n", "<think>\nwhy\n\nnot</\n</think>\n\nyes\n", size),
                pair("why\n\nnot</", "yes\n")
            );
            assert_eq!(split("assistant\n<think>\n", "why\n</think>\n\nyes", size), pair("why", "yes"));
            assert_eq!(split("assistant\n", "<think>\n\n</think>\n\nyes", size), pair("", "yes"));
            assert_eq!(split("assistant\n", "\n <thin air", size), pair("", "\n <thin air"));
            assert_eq!(split("assistant\n", "a <think>b</think>", size), pair("", "a <think>b</think>"));
            assert_eq!(split("assistant\n", "<think>cut off\n", size), pair("cut off", ""));
            assert_eq!(split("assistant\n", "<thi", size), pair("", "<thi"));
            assert_eq!(
                split("model\n", "<|channel>thought\nwhy <think>\n<channel|>yes", size),
                pair("why <think>", "yes")
            );
            assert_eq!(split("model\n<|channel>thought\n", "why\n<channel|>yes", size), pair("why", "yes"));
            assert_eq!(split("model\n", "<|channel>thought\n<channel|>yes", size), pair("", "yes"));
            assert_eq!(split("model\n<|channel>thought\n<channel|>", "yes", size), pair("", "yes"));
            assert_eq!(split("model\n", "<|channel>why<channel|>yes", size), pair("why", "yes"));
            assert_eq!(split("model\n", "<|channel>thou", size), pair("", ""));
            assert_eq!(split("model\n", "thought", size), pair("", "thought"));
        }
    }
}
