//! The memory limit of KV caches, and the recovery when memory runs out nevertheless.

use super::Engine;
use crate::{EngineError, Event, Proposer, Request, Target, VerifyRule};

/// Bytes of a sequence of `tokens` tokens, and one drafted block or tree behind them, in the KV caches of both models. The attention masks
/// of trees count, too.
pub fn sequence_bytes<T: Target>(
    target: &T,
    proposer: Option<&dyn Proposer>,
    rule: VerifyRule,
    tokens: usize,
) -> u64 {
    let drafted = rule.max_drafted(proposer.map_or(0, |proposer| proposer.draft_len()));
    let tokens = tokens.saturating_add(drafted);
    let drafter = proposer.map_or(0, |proposer| proposer.kv_cache_bytes(tokens));
    let masks = match rule.tree_budget() {
        Some(_) if drafted > 0 => target.tree_mask_bytes(1 + drafted, tokens),
        _ => 0,
    };
    target.kv_cache_bytes(tokens).saturating_add(drafter).saturating_add(masks)
}

impl<T: Target, P: Proposer> Engine<T, P> {
    /// Limits the total bytes of all KV caches. A sequence starts when its maximum size fits in
    /// addition to the running sequences. A request that could never fit is refused.
    #[must_use]
    pub fn with_kv_cache_limit(mut self, bytes: u64) -> Self {
        self.memory = Some(bytes);
        self
    }

    /// Maximum tokens of a request (prompt, answer and one drafted block or tree), and their bytes by [`sequence_bytes`].
    pub(super) fn memory_needed(&self, request: &Request) -> (usize, u64) {
        let (rule, proposer) = (self.options.verify_rule, self.proposer.as_ref());
        let tokens = request.prompt.len().saturating_add(request.max_new_tokens);
        let bytes =
            sequence_bytes(&self.target, proposer.map(|proposer| proposer as &dyn Proposer), rule, tokens);
        (tokens.saturating_add(rule.max_drafted(proposer.map_or(0, Proposer::draft_len))), bytes)
    }

    /// Whether a sequence whose KV caches need up to `bytes` can start now.
    pub(super) fn can_start(&self, bytes: u64) -> bool {
        let taken: u64 = self.slots.iter().flatten().map(|sequence| sequence.bytes).sum();
        self.memory.is_none_or(|memory| taken.saturating_add(bytes) <= memory)
    }

    /// Rolls all KV caches back to their state before a step that ran out of memory. Then ends the
    /// sequence that frees the most memory. This is the longest prompt of the step, or the longest
    /// sequence if the step has no prompts.
    pub(super) fn fail_largest(&mut self, message: &str) -> Option<Event> {
        for slot in 0..self.slots.len() {
            let Some((target_len, drafter_len)) =
                self.slots[slot].as_ref().map(|s| (s.target_len, s.drafter_len))
            else {
                continue;
            };
            self.target.truncate(slot, target_len);
            if let Some(proposer) = &mut self.proposer {
                proposer.truncate(slot, drafter_len);
            }
        }
        let size =
            |slot: &usize| self.slots[*slot].as_ref().map(|s| (s.anchor.is_none(), s.len(), s.request_id));
        let largest = (0..self.slots.len()).max_by_key(size)?;
        let sequence = self.free_slot(largest)?;
        self.target.free_cached_memory();
        if let Some(proposer) = &mut self.proposer {
            proposer.free_cached_memory();
        }
        let error = EngineError::OutOfMemory { tokens: sequence.len(), message: allocator_message(message) };
        Some(Event::Failed(sequence.request_id, error))
    }
}

/// The allocator's message without the panic's wrapping, which escapes line ends, and without the
/// stack trace.
fn allocator_message(message: &str) -> String {
    let own = message.split_once("Torch(\"").map_or(message, |(_, own)| own);
    let end = own.find("\\n").or_else(|| own.find('\n')).unwrap_or(own.len());
    own[..end].trim_end_matches("\")").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_allocators_words_are_one_line() {
        let panic = r#"called `Result::unwrap()` on an `Err` value: Torch("CUDA out of memory. Tried to allocate 2 GiB.\nframe #0: x")"#;
        assert_eq!(allocator_message(panic), "CUDA out of memory. Tried to allocate 2 GiB.");
        assert_eq!(allocator_message("no memory for 12 bytes\nmore"), "no memory for 12 bytes");
    }
}
