//! The memory limit of KV caches, and the recovery when memory runs out nevertheless.

use super::Engine;
use crate::{EngineError, Event, Proposer, Request, Target};

impl<T: Target, P: Proposer> Engine<T, P> {
    /// Limits the bytes of all KV caches together. A sequence starts when its maximum size fits
    /// beside the running ones. A request that could never fit is refused.
    #[must_use]
    pub fn with_memory(mut self, bytes: u64) -> Self {
        self.memory = Some(bytes);
        self
    }

    /// Maximum tokens of a request (prompt, answer and one drafted block), and the bytes of their
    /// KV caches.
    pub(super) fn need(&self, request: &Request) -> (usize, u64) {
        let block = self.proposer.as_ref().map_or(0, Proposer::draft_len);
        let tokens = request.prompt.len().saturating_add(request.max_new_tokens).saturating_add(block);
        let drafter = self.proposer.as_ref().map_or(0, |proposer| proposer.history_bytes(tokens));
        (tokens, self.target.history_bytes(tokens).saturating_add(drafter))
    }

    /// Whether a sequence of `bytes` can start now.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        let taken: u64 = self.slots.iter().flatten().map(|sequence| sequence.bytes).sum();
        self.memory.is_none_or(|memory| taken.saturating_add(bytes) <= memory)
    }

    /// Rolls all KV caches back to their state before a step that ran out of memory. Then ends the
    /// sequence that frees the most memory. This is the longest prompt that was to be run, else the
    /// longest sequence.
    pub(super) fn give_up_one(&mut self, words: &str) -> Option<Event> {
        for slot in 0..self.slots.len() {
            let Some((held, seen)) = self.slots[slot].as_ref().map(|s| (s.held, s.seen)) else { continue };
            self.target.truncate(slot, held);
            if let Some(proposer) = &mut self.proposer {
                proposer.truncate(slot, seen);
            }
        }
        let size = |slot: &usize| self.slots[*slot].as_ref().map(|s| (s.anchor.is_none(), s.len(), s.ticket));
        let largest = (0..self.slots.len()).max_by_key(size)?;
        let sequence = self.vacate(largest)?;
        self.target.release();
        if let Some(proposer) = &mut self.proposer {
            proposer.release();
        }
        let error = EngineError::OutOfMemory { tokens: sequence.len(), words: first_line(words) };
        Some(Event::Failed(sequence.ticket, error))
    }
}

/// The allocator's message without the panic's wrapping, which escapes line ends, and without the
/// stack trace.
fn first_line(words: &str) -> String {
    let own = words.split_once("Torch(\"").map_or(words, |(_, own)| own);
    let end = own.find("\\n").or_else(|| own.find('\n')).unwrap_or(own.len());
    own[..end].trim_end_matches("\")").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_allocators_words_are_one_line() {
        let panic = r#"called `Result::unwrap()` on an `Err` value: Torch("CUDA out of memory. Tried to allocate 2 GiB.\nframe #0: x")"#;
        assert_eq!(first_line(panic), "CUDA out of memory. Tried to allocate 2 GiB.");
        assert_eq!(first_line("no memory for 12 bytes\nmore"), "no memory for 12 bytes");
    }
}
