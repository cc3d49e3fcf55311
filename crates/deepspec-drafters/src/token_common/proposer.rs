//! Drafting one token after the other, with a KV cache of committed tokens.

use deepspec_core::Tap;
use deepspec_engine::{DraftRequest, DraftSampling, Proposal, Proposer};
use deepspec_models::{ModelConfig, ModelError};
use deepspec_ops::kv_attention::{Chunk, KvCache, MaskKind};
use tch::Tensor;

use super::{LastStates, TokenDrafter};
use crate::draft_model::{DraftModel, DrafterSettings as _};
use crate::drafter::draft_autoregressively;
use crate::{Drafter, DrafterProbe};

/// A drafter that drafts one token after the other, with a KV cache of committed tokens.
pub struct TokenProposer<K: TokenDrafter> {
    model: DraftModel<K>,
    draft_len: usize,
    cache: KvCache,
    last: LastStates,
}

impl<K: TokenDrafter> TokenProposer<K> {
    /// A proposer with an empty KV cache for `slots` sequences.
    pub fn new(model: DraftModel<K>, slots: usize) -> Self {
        let (kind, device) = (model.kind(), model.device());
        let cache = KvCache::new(&model.attention_specs(), slots, kind, device);
        let last = LastStates::new(slots, model.config().model().hidden_size, kind, device);
        Self { cache, last, draft_len: model.config().settings.draft_len(), model }
    }

    /// The model.
    pub fn model(&self) -> &DraftModel<K> {
        &self.model
    }

    /// Runs the layers over tokens and the states before them, appends keys and values to the cache, and returns the new states.
    fn extend_cache(&mut self, chunks: &[Chunk], tokens: &Tensor, states: &Tensor) -> Tensor {
        let plan = self.cache.plan(chunks, MaskKind::Causal);
        let states = K::next_states(&self.model, states, tokens, &plan, &mut self.cache);
        self.cache.commit_chunks(chunks);
        states
    }

    /// Chunks of the newly committed tokens, and the chunks of each drafted token except the last, which no later draft reads.
    fn context_and_draft_chunks(&self, request: &DraftRequest) -> (Vec<Chunk>, Vec<Vec<Chunk>>) {
        let context_chunks = self.cache.chunks_to_append(&request.context.chunks);
        let chunks_of_draft = |k: usize| {
            let chunk = |&slot: &usize| {
                let rows =
                    context_chunks.iter().find(|chunk| chunk.slot == slot).map_or(0, |chunk| chunk.len);
                Chunk { slot, past_len: self.cache.len(slot) + rows + k, len: 1 }
            };
            request.slots.iter().map(chunk).collect()
        };
        let draft_chunks = (0..self.draft_len.saturating_sub(1)).map(chunks_of_draft).collect();
        (context_chunks, draft_chunks)
    }
}

impl<K: TokenDrafter> Drafter for TokenProposer<K> {
    fn share(&self, slots: usize) -> Box<dyn Drafter> {
        K::into_drafter(self.model.share(), slots)
    }

    fn taps(&self) -> &[Tap] {
        &self.model.config().decoder.taps
    }

    fn draft_sampling(&self) -> DraftSampling {
        DraftSampling::Probabilistic
    }

    fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError> {
        self.model.config().decoder.check_fits(target)
    }

    fn set_draft_len(&mut self, tokens: usize) {
        self.draft_len = tokens.min(self.model.config().settings.draft_len());
    }

    fn probe(&self) -> Option<Box<dyn DrafterProbe>> {
        Some(Box::new(self.model.share()))
    }
}

impl<K: TokenDrafter> Proposer for TokenProposer<K> {
    fn draft_len(&self) -> usize {
        self.draft_len
    }

    fn ends_at_stop_tokens(&self) -> bool {
        true
    }

    fn reads_hidden(&self) -> bool {
        K::READS_HIDDEN
    }

    fn tree_refusal(&self) -> Option<&'static str> {
        K::TREE_REFUSAL
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let (context_chunks, draft_chunks) = self.context_and_draft_chunks(request);
        self.cache.reserve(&[context_chunks.clone(), draft_chunks.concat()].concat());
        let (context, slots) = (request.context, request.slots);
        if !context_chunks.is_empty() {
            let states = K::context_states(&self.model, context);
            let states = self.extend_cache(&context_chunks, &context.next, &states);
            self.last.update(context, &states);
        }
        let past_len: Vec<usize> = slots.iter().map(|&slot| self.cache.len(slot)).collect();
        let mut states = self.last.of_slots(slots); // [S, d]
        let mut draft_chunks = draft_chunks.iter();
        let proposal = draft_autoregressively(request, self.draft_len, |last| {
            if let Some(token) = last
                && let Some(chunks) = draft_chunks.next()
            {
                states = self.extend_cache(chunks, token, &states);
            }
            K::state_logits(&self.model, &states)
        });
        // Drafted tokens leave the cache; accepted ones return with the target's hidden states.
        slots.iter().zip(past_len).for_each(|(&slot, past_len)| self.cache.truncate(slot, past_len));
        proposal
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.cache.truncate(slot, len);
    }

    fn kv_cache_bytes(&self, tokens: usize) -> u64 {
        self.cache.kv_cache_bytes(tokens) as u64
    }

    fn free_cached_memory(&mut self) {
        self.cache.free_cached_memory();
    }
}
