//! Proposing: committed tokens are taken in with the target's states, then the drafter goes on alone.

use deepspec_decode::{Context, DraftRequest, Proposal, Proposer};
use tch::Tensor;

use super::model::Eagle3;
use crate::drafters::token_by_token;
use crate::kv::{KvCache, Visibility};

/// An Eagle3 drafter with histories of committed tokens.
pub struct Eagle3Proposer {
    model: Eagle3,
    block_size: usize,
    cache: KvCache,
    /// State after each slot's last committed token, `[slots, d]`.
    states: Tensor,
}

impl Eagle3Proposer {
    /// A proposer with empty histories for `slots` sequences.
    pub fn new(model: Eagle3, slots: usize) -> Self {
        let (kind, device) = (model.kind(), model.device());
        let cache = KvCache::new(&model.attentions(), slots, kind, device);
        let states = Tensor::zeros([slots as i64, model.config().model.hidden_size], (kind, device));
        Self { cache, states, block_size: model.config().ttt_length, model }
    }

    /// The model.
    pub fn model(&self) -> &Eagle3 {
        &self.model
    }

    /// Proposes `tokens` per block from now on, at most as many as it was trained for.
    pub fn draft(&mut self, tokens: usize) {
        self.block_size = tokens.min(self.model.config().ttt_length);
    }

    /// Runs tokens behind the states before them; the histories grow by them.
    fn extend(&mut self, chunks: &[(usize, usize)], tokens: &Tensor, states: Tensor) -> Tensor {
        let plan = self.cache.plan(chunks, Visibility::Causal);
        let (token, rotations) = (self.model.embed(tokens), self.model.rotations(plan.positions()));
        let layers = self.model.parts.layers.iter().enumerate();
        let states = layers.fold(states, |states, (i, layer)| {
            layer.forward(&token, &states, rotations.of(i), |qkv| self.cache.attend(i, &plan, qkv))
        });
        self.cache.advance(chunks);
        states
    }

    /// Appends newly verified tokens to the histories.
    fn take_in(&mut self, context: &Context) {
        if context.chunks.is_empty() {
            return;
        }
        let states = self.model.fuse(&context.taps);
        let states = self.extend(&context.chunks, &context.next, states);
        let (mut slots, mut ends, mut end) = (vec![], vec![], 0);
        for &(slot, rows) in &context.chunks {
            end += rows as i64;
            slots.push(slot as i64);
            ends.push(end - 1);
        }
        let index = |values: &[i64]| Tensor::from_slice(values).to_device(self.model.device());
        let _ = self.states.index_copy_(0, &index(&slots), &states.index_select(0, &index(&ends)));
    }
}

impl Proposer for Eagle3Proposer {
    fn block_size(&self) -> usize {
        self.block_size
    }

    fn ends_at_stop_tokens(&self) -> bool {
        true
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let slots = request.slots;
        self.take_in(request.context);
        let held: Vec<usize> = slots.iter().map(|&slot| self.cache.held(slot)).collect();
        let chunks: Vec<(usize, usize)> = slots.iter().map(|&slot| (slot, 1)).collect();
        let rows: Vec<i64> = slots.iter().map(|&slot| slot as i64).collect();
        let rows = Tensor::from_slice(&rows).to_device(self.model.device());
        let mut states = self.states.index_select(0, &rows); // [S, d]
        let proposal = token_by_token(request, self.block_size, |last| {
            if let Some(token) = last {
                states = self.extend(&chunks, token, states.shallow_clone());
            }
            self.model.draft_logits(&states)
        });
        // What was drafted is forgotten; what of it is accepted comes back with the target's states.
        slots.iter().zip(held).for_each(|(&slot, held)| self.cache.truncate(slot, held));
        proposal
    }

    fn reset(&mut self, slot: usize) {
        self.cache.truncate(slot, 0);
    }
}
