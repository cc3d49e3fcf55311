//! Special tokens that open or close reasoning, and where an answer may contain them.

use tokenizers::Tokenizer;

use crate::thoughts::{FENCES, ThinkTags};

/// Think tags of which at least one is a special token. The other may be ordinary text, or missing
/// from the vocabulary.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SpecialFence {
    fence: &'static ThinkTags,
    open: Option<u32>,
    close: Option<u32>,
}

impl SpecialFence {
    /// The think tags of a tokenizer that have a special token.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Vec<Self> {
        let special = |mark| {
            let id = tokenizer.token_to_id(mark)?;
            tokenizer.get_added_vocabulary().is_special_token(mark).then_some(id)
        };
        let found =
            FENCES.iter().map(|fence| Self { fence, open: special(fence.open), close: special(fence.close) });
        found.filter(|fence| fence.open.is_some() || fence.close.is_some()).collect()
    }
}

/// The special tokens that may open or close reasoning at the current position of an answer.
#[derive(Debug, Clone)]
pub(crate) struct Marks {
    /// Opening tokens with their think tags; they count only at the start of an answer.
    open: Vec<(u32, SpecialFence)>,
    close: Vec<u32>,
}

impl Marks {
    /// The tokens for an answer to `prompt`, which may have opened the reasoning already.
    pub(crate) fn after(prompt: &str, fences: &[SpecialFence]) -> Self {
        match ThinkTags::opened_by(prompt) {
            Some(opened) => {
                let close =
                    fences.iter().filter(|fence| fence.fence == opened).filter_map(|fence| fence.close);
                Self { open: vec![], close: close.collect() }
            }
            // An opening tag of ordinary tokens is not seen here, so its closing token may come at
            // any time.
            None => {
                let unseen = fences.iter().filter(|fence| fence.open.is_none());
                Self { close: unseen.filter_map(|fence| fence.close).collect(), ..Self::all(fences) }
            }
        }
    }

    /// The tokens for an answer to an unknown prompt.
    pub(crate) fn all(fences: &[SpecialFence]) -> Self {
        let open = fences.iter().filter_map(|&fence| Some((fence.open?, fence)));
        let close = fences.iter().filter_map(|fence| fence.close);
        Self { open: open.collect(), close: close.collect() }
    }

    /// Whether `id` is one of the tokens.
    pub(crate) fn has(&self, id: u32) -> bool {
        self.close.contains(&id) || self.open.iter().any(|&(open, _)| open == id)
    }

    /// Whether `id` opens or closes reasoning here; `first` says that only white space came before
    /// it. Reasoning opens and closes at most once.
    pub(crate) fn take(&mut self, id: u32, first: bool) -> bool {
        let opened = self.open.iter().find(|&&(open, _)| first && open == id).map(|&(_, fence)| fence);
        let close = match opened {
            Some(fence) => fence.close.into_iter().collect(),
            None if self.close.contains(&id) => vec![],
            None => return false,
        };
        *self = Self { open: vec![], close };
        true
    }
}
