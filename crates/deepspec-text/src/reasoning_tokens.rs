//! Special tokens that open or close reasoning, and where an answer may contain them.

use tokenizers::Tokenizer;

use crate::reasoning::{THINK_TAGS, ThinkTags};

/// Think tags of which at least one is a special token. The second tag may be ordinary text, or missing from the
/// vocabulary.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SpecialThinkTags {
    tags: &'static ThinkTags,
    open: Option<u32>,
    close: Option<u32>,
}

impl SpecialThinkTags {
    /// The think tags of a tokenizer that have a special token.
    pub(crate) fn find(tokenizer: &Tokenizer) -> Vec<Self> {
        let special = |tag| {
            let id = tokenizer.token_to_id(tag)?;
            tokenizer.get_added_vocabulary().is_special_token(tag).then_some(id)
        };
        let found =
            THINK_TAGS.iter().map(|tags| Self { tags, open: special(tags.open), close: special(tags.close) });
        found.filter(|tags| tags.open.is_some() || tags.close.is_some()).collect()
    }
}

/// The special tokens that may open or close reasoning at the current position of an answer.
#[derive(Debug, Clone)]
pub(crate) struct ReasoningTokens {
    /// Ids of opening tokens, with their think tags. An opening token counts only if white space alone
    /// precedes it in the answer.
    open: Vec<(u32, SpecialThinkTags)>,
    close: Vec<u32>,
}

impl ReasoningTokens {
    /// The tokens for an answer to `prompt`, which may have opened the reasoning already.
    pub(crate) fn for_prompt(prompt: &str, think_tags: &[SpecialThinkTags]) -> Self {
        match ThinkTags::opened_by(prompt) {
            Some(opened) => {
                let close =
                    think_tags.iter().filter(|tags| tags.tags == opened).filter_map(|tags| tags.close);
                Self { open: vec![], close: close.collect() }
            }
            // An opening tag of ordinary tokens is not seen here, so its closing token may come at
            // any time.
            None => {
                let unseen = think_tags.iter().filter(|tags| tags.open.is_none());
                Self {
                    close: unseen.filter_map(|tags| tags.close).collect(),
                    ..Self::for_unknown_prompt(think_tags)
                }
            }
        }
    }

    /// The tokens for an answer to an unknown prompt.
    pub(crate) fn for_unknown_prompt(think_tags: &[SpecialThinkTags]) -> Self {
        let open = think_tags.iter().filter_map(|&tags| Some((tags.open?, tags)));
        let close = think_tags.iter().filter_map(|tags| tags.close);
        Self { open: open.collect(), close: close.collect() }
    }

    /// Whether `id` is one of the tokens.
    pub(crate) fn contains(&self, id: u32) -> bool {
        self.close.contains(&id) || self.open.iter().any(|&(open, _)| open == id)
    }

    /// Whether `id` opens or closes reasoning here; if so, updates the state. `first` says that
    /// only white space came before `id`. Reasoning opens and closes at most once.
    pub(crate) fn accept(&mut self, id: u32, first: bool) -> bool {
        let opened = self.open.iter().find(|&&(open, _)| first && open == id).map(|&(_, tags)| tags);
        let close = match opened {
            Some(tags) => tags.close.into_iter().collect(),
            None if self.close.contains(&id) => vec![],
            None => return false,
        };
        *self = Self { open: vec![], close };
        true
    }
}
