//! Proposing: committed tokens are taken in with the target's states, then the drafter goes on alone.

use deepspec_core::Tap;
use deepspec_engine::{DraftRequest, DraftSampling, Proposal, Proposer};
use deepspec_models::nn::LayerInput;
use deepspec_models::{ModelConfig, ModelError};
use deepspec_ops::kv_attention::{Chunk, KvCache, MaskKind};
use deepspec_ops::{DeviceArange, runs};
use tch::Tensor;

use super::model::Eagle3;
use crate::drafter::token_by_token;
use crate::{Drafter, DrafterProbe};

/// An Eagle3 drafter with histories of committed tokens.
pub struct Eagle3Proposer {
    model: Eagle3,
    block_size: usize,
    cache: KvCache,
    /// State after each slot's last committed token, `[slots, d]`.
    states: Tensor,
    /// Which lists of slots are cut from.
    ruler: DeviceArange,
}

impl Eagle3Proposer {
    /// A proposer with empty histories for `slots` sequences.
    pub fn new(model: Eagle3, slots: usize) -> Self {
        let (kind, device) = (model.kind(), model.device());
        let cache = KvCache::new(&model.attentions(), slots, kind, device);
        let states = Tensor::zeros([slots as i64, model.config().decoder.model.hidden_size], (kind, device));
        Self { cache, states, ruler: DeviceArange::new(device), block_size: model.config().ttt_length, model }
    }

    /// The model.
    pub fn model(&self) -> &Eagle3 {
        &self.model
    }

    /// Runs tokens behind the states before them; the histories grow by them.
    fn extend(&mut self, chunks: &[Chunk], tokens: &Tensor, states: Tensor) -> Tensor {
        let plan = self.cache.plan(chunks, MaskKind::Causal);
        let (token, rotations) = (self.model.embed(tokens), self.model.planned_rotations(&plan));
        let layers = self.model.parts.layers.iter().enumerate();
        let states = layers.fold(states, |states, (i, layer)| {
            let input = LayerInput { x: &states, repeated: None, embeddings: Some(&token) };
            layer.forward(input, rotations.of(i), &mut self.cache.attention(i, &plan), None)
        });
        self.cache.advance(chunks);
        states
    }

    /// The chunks that are taken in, and those of each drafted token but the last.
    fn chunks(&self, request: &DraftRequest) -> (Vec<Chunk>, Vec<Vec<Chunk>>) {
        let taken = self.cache.behind(&request.context.chunks);
        let drafted = |k: usize| {
            let chunk = |&slot: &usize| {
                let rows = taken.iter().find(|chunk| chunk.slot == slot).map_or(0, |chunk| chunk.len);
                Chunk { slot, past_len: self.cache.len(slot) + rows + k, len: 1 }
            };
            request.slots.iter().map(chunk).collect()
        };
        let drafted = (0..self.block_size.saturating_sub(1)).map(drafted).collect();
        (taken, drafted)
    }
}

impl Drafter for Eagle3Proposer {
    fn share(&self, slots: usize) -> Box<dyn Drafter> {
        Box::new(Self::new(self.model.share(), slots))
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

    fn draft(&mut self, tokens: usize) {
        self.block_size = tokens.min(self.model.config().ttt_length);
    }

    fn examined(&self) -> Option<Box<dyn DrafterProbe>> {
        Some(Box::new(self.model.share()))
    }
}

impl Proposer for Eagle3Proposer {
    fn draft_len(&self) -> usize {
        self.block_size
    }

    fn ends_at_stop_tokens(&self) -> bool {
        true
    }

    fn reads_hidden(&self) -> bool {
        false
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let (taken, drafted) = self.chunks(request);
        self.cache.reserve(&[taken.clone(), drafted.concat()].concat());
        let (context, slots) = (request.context, request.slots);
        if !taken.is_empty() {
            let states = self.extend(&taken, &context.next, self.model.fuse(&context.taps));
            // Every slot's last committed token.
            let ends = context.chunks.iter().scan(0, |end, &(_, rows)| {
                *end += rows as i64;
                Some((*end - 1, 1))
            });
            let new = self.ruler.pick(context.chunks.iter().map(|&(slot, _)| slot));
            let _ = self.states.index_copy_(0, &new, &runs(&states, ends));
        }
        let past_len: Vec<usize> = slots.iter().map(|&slot| self.cache.len(slot)).collect();
        let mut states = self.states.index_select(0, &self.ruler.pick(slots.iter().copied())); // [S, d]
        let mut drafted = drafted.iter();
        let proposal = token_by_token(request, self.block_size, |last| {
            if let Some(token) = last
                && let Some(chunks) = drafted.next()
            {
                states = self.extend(chunks, token, states.shallow_clone());
            }
            self.model.draft_logits(&states)
        });
        // What was drafted is forgotten; what of it is accepted comes back with the target's states.
        slots.iter().zip(past_len).for_each(|(&slot, past_len)| self.cache.truncate(slot, past_len));
        proposal
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.cache.truncate(slot, len);
    }

    fn history_bytes(&self, tokens: usize) -> u64 {
        self.cache.history_bytes(tokens) as u64
    }

    fn release(&mut self) {
        self.cache.release();
    }
}
