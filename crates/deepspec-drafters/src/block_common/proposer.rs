//! Drafting with block drafters. Keys and values of the context are projected once per verified token, and cached.

use deepspec_core::Tap;
use deepspec_engine::{Context, DraftRequest, DraftSampling, Proposal, Proposer};
use deepspec_models::nn::LayerInput;
use deepspec_models::{ModelConfig, ModelError};
use deepspec_ops::RepeatedRows;
use deepspec_ops::kv_attention::{Chunk, KvCache, MaskKind, Rows};
use tch::Tensor;

use super::BlockDrafter;
use super::backbone::over_blocks;
use crate::draft_model::DraftModel;
use crate::{Drafter, DrafterProbe};

/// A block drafter with a KV cache.
pub struct BlockProposerOf<K: BlockDrafter> {
    model: DraftModel<K>,
    cache: KvCache,
}

/// Inputs of the confidence head for drafted blocks.
pub struct Drafting {
    /// Hidden states after the final norm, `[S, γ, d]`.
    pub hidden: Tensor,
    /// Embeddings of the tokens before each slot, `[S, γ, r]`.
    pub embeddings: Option<Tensor>,
}

impl<K: BlockDrafter> BlockProposerOf<K> {
    /// A proposer with an empty KV cache for `slots` sequences.
    pub fn new(model: DraftModel<K>, slots: usize) -> Self {
        let cache = KvCache::new(&model.attentions(), slots, model.kind(), model.device());
        Self { model, cache }
    }

    /// The model.
    pub fn model(&self) -> &DraftModel<K> {
        &self.model
    }

    /// Appends the context to the cache and runs blocks at the `anchors [S]`. Slot by slot, `choose(k, logits)` picks tokens `[S]` from
    /// float32 logits `[S, V]`, and the next slot continues from them.
    pub fn forward(
        &mut self,
        context: &Context,
        slots: &[usize],
        anchors: &Tensor,
        mut choose: impl FnMut(i64, &Tensor) -> Tensor,
    ) -> Drafting {
        let taken = self.cache.append(&context.chunks);
        let blocks = self.blocks(&taken, slots);
        self.cache.reserve(&[taken.as_slice(), &blocks].concat());
        if !taken.is_empty() {
            self.append_context(context, &taken, &self.cache.place(&taken));
        }
        let hidden = self.hidden(&blocks, anchors); // [S, γ, d]
        let base = self.model.base_logits(&hidden); // [S, γ, V]
        let (mut previous, mut state, mut embeddings) =
            (anchors.shallow_clone(), K::State::default(), vec![]);
        for k in 0..self.draft_len() as i64 {
            let (base, own) = (base.select(1, k), hidden.select(1, k));
            let (logits, embedding) = K::step(&self.model, base, &own, &previous, &mut state);
            embeddings.extend(embedding);
            previous = choose(k, &logits);
        }
        let embeddings = (!embeddings.is_empty()).then(|| Tensor::stack(&embeddings, 1)); // [S, γ, r]
        Drafting { hidden, embeddings }
    }

    /// Blocks of the slots, after the context that is appended.
    fn blocks(&self, taken: &[Chunk], slots: &[usize]) -> Vec<Chunk> {
        let len = self.slots();
        let block = |&slot: &usize| {
            let taken = taken.iter().find(|chunk| chunk.slot == slot);
            Chunk {
                slot,
                past_len: taken.map_or_else(|| self.cache.len(slot), |chunk| chunk.past_len + chunk.len),
                len,
            }
        };
        slots.iter().map(block).collect()
    }

    /// Appends keys and values of newly verified tokens to the cache.
    fn append_context(&mut self, context: &Context, chunks: &[Chunk], rows: &Rows) {
        let rotations = self.model.rotations(rows.positions());
        let hidden = self.model.context(&context.captured_states);
        for (i, layer) in self.model.parts.backbone().layers.iter().enumerate() {
            let (k, v) = layer.attention.project_context(&hidden, rotations.of(i));
            self.cache.write(i, rows, &k, &v);
        }
        self.cache.advance(chunks);
    }

    /// Hidden states `[S, γ, d]` of blocks `[anchor, mask, …]`, after the final norm. The blocks' own keys are in the cache for this pass
    /// only: it does not advance over them.
    fn hidden(&mut self, blocks: &[Chunk], anchors: &Tensor) -> Tensor {
        let plan = self.cache.plan(blocks, MaskKind::Block);
        let rotations = self.model.planned_rotations(&plan);
        let (mask, size) = (K::blocks(self.model.config()).mask_token_id, self.slots() as i64);
        let distinct =
            Tensor::cat(&[anchors, &Tensor::full([1], mask, (anchors.kind(), anchors.device()))], 0);
        let distinct = self.model.embed(&distinct); // [S + 1, d]
        let repeat = |rows: &Tensor| over_blocks(rows, size);
        let mut x = repeat(&distinct); // [S·B, d]
        for (i, layer) in self.model.parts.backbone().layers.iter().enumerate() {
            let hook = self.model.parts.hook(i);
            let repeated = match i == 0 && size > 1 && hook.is_none() {
                true => RepeatedRows::for_inference(&distinct, &repeat),
                false => None,
            };
            let input = LayerInput { x: &x, repeated, embeddings: None };
            x = layer.forward(input, rotations.of(i), &mut self.cache.attention(i, &plan), hook);
        }
        self.model.drafting_states(&x)
    }

    /// B, slots of a block.
    fn slots(&self) -> usize {
        K::blocks(self.model.config()).block_size
    }
}

impl<K: BlockDrafter> Drafter for BlockProposerOf<K> {
    fn share(&self, slots: usize) -> Box<dyn Drafter> {
        K::drafter(self.model.share(), slots)
    }

    fn taps(&self) -> &[Tap] {
        &self.model.config().decoder.taps
    }

    fn has_confidence(&self) -> bool {
        K::has_confidence(self.model.config())
    }

    fn draft_sampling(&self) -> DraftSampling {
        self.model.parts.draft_sampling()
    }

    fn ignore_markov(&mut self) -> bool {
        self.model.parts.ignore_markov()
    }

    fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError> {
        self.model.config().decoder.check_fits(target)
    }

    fn examined(&self) -> Option<Box<dyn DrafterProbe>> {
        Some(Box::new(self.model.share()))
    }
}

impl<K: BlockDrafter> Proposer for BlockProposerOf<K> {
    fn draft_len(&self) -> usize {
        K::blocks(self.model.config()).drafted()
    }

    fn reads_hidden(&self) -> bool {
        false
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let DraftRequest { context, slots, anchors, uniforms, sampling } = *request;
        let mut draws = vec![];
        let Drafting { hidden, embeddings } = self.forward(context, slots, anchors, |k, logits| {
            let (drawn, distribution) = sampling.sample(logits, &uniforms.select(1, k));
            draws.push((drawn.shallow_clone(), distribution));
            drawn
        });
        let confidence = self.model.confidence_logits(&hidden, embeddings.as_ref());
        Proposal::stack(draws, confidence)
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.cache.truncate(slot, len);
    }

    fn kv_cache_bytes(&self, tokens: usize) -> u64 {
        let idle = K::blocks(self.model.config()).slots.first();
        self.cache.kv_cache_bytes(tokens + idle) as u64
    }

    fn free_cached_memory(&mut self) {
        self.cache.release();
    }
}
