//! Special tokens that fence thoughts, and where in an answer they may.

use tokenizers::Tokenizer;

use crate::thoughts::{FENCES, ThinkTags};

/// A fence of which at least one mark is a special token. The other is a text like any, or none of the vocabulary.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SpecialFence {
    fence: &'static ThinkTags,
    open: Option<u32>,
    close: Option<u32>,
}

impl SpecialFence {
    /// Those of a tokenizer.
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

/// The special tokens that would fence thoughts if they came next.
#[derive(Debug, Clone)]
pub(crate) struct Marks {
    /// The opening marks, with the fences that they open; only before anything else.
    open: Vec<(u32, SpecialFence)>,
    close: Vec<u32>,
}

impl Marks {
    /// Those of an answer to `prompt`, which may have opened the thoughts already.
    pub(crate) fn after(prompt: &str, fences: &[SpecialFence]) -> Self {
        match ThinkTags::opened_by(prompt) {
            Some(opened) => {
                let close =
                    fences.iter().filter(|fence| fence.fence == opened).filter_map(|fence| fence.close);
                Self { open: vec![], close: close.collect() }
            }
            // Thoughts that ordinary tokens open are not seen here, so their closing mark may come at any time.
            None => {
                let unseen = fences.iter().filter(|fence| fence.open.is_none());
                Self { close: unseen.filter_map(|fence| fence.close).collect(), ..Self::all(fences) }
            }
        }
    }

    /// Those of an answer to an unknown prompt.
    pub(crate) fn all(fences: &[SpecialFence]) -> Self {
        let open = fences.iter().filter_map(|&fence| Some((fence.open?, fence)));
        let close = fences.iter().filter_map(|fence| fence.close);
        Self { open: open.collect(), close: close.collect() }
    }

    /// Whether a token is one of them.
    pub(crate) fn has(&self, id: u32) -> bool {
        self.close.contains(&id) || self.open.iter().any(|&(open, _)| open == id)
    }

    /// Whether a token is a mark here; `first` says that nothing came before it. Thoughts are opened and closed once.
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
