//! Drafting with block drafters. Keys and values of the context are projected once per committed token, and cached.

use deepspec_core::Tap;
use deepspec_engine::{Context, DraftRequest, DraftSampling, Proposal, Proposer, TreeBudget};
use deepspec_models::nn::LayerInput;
use deepspec_models::{ModelConfig, ModelError};
use deepspec_ops::kv_attention::{Chunk, KvCache, PooledRows};
use deepspec_ops::{DeviceArange, DraftTree, RepeatedRows, cat_row_runs};
use tch::{Kind, Tensor};

use super::backbone::repeat_over_blocks;
use super::drafting::{draft, grow_trees, propose};
use super::{BackboneDrafter, BlockStates};
use crate::draft_model::{DraftModel, DrafterSettings as _};
use crate::{Drafter, DrafterProbe};

/// A block drafter with a KV cache.
pub struct BlockProposerOf<K: BackboneDrafter> {
    model: DraftModel<K>,
    cache: KvCache,
    /// None if the heads do not read the anchor's slot.
    last_tokens: Option<LastTokens>,
}

/// Stands for the token before an anchor that is the first token.
const UNKNOWN: i64 = -1;

/// Last context token of each slot, which is the token before its anchor.
struct LastTokens {
    /// `[slots]` int64.
    tokens: Tensor,
    /// Source of index tensors of slots.
    arange: DeviceArange,
}

impl LastTokens {
    /// Takes over the last token of each chunk of the context.
    fn update(&mut self, context: &Context) {
        let ends = context.chunks.iter().scan(0, |end, &(_, rows)| {
            *end += rows as i64;
            Some((*end - 1, 1))
        });
        let slots = self.arange.int_tensor(context.chunks.iter().map(|&(slot, _)| slot));
        let _ = self.tokens.index_copy_(0, &slots, &cat_row_runs(&context.tokens, ends));
    }

    /// Tokens of these slots, `[S]`, and the slot's anchor where a sequence has none.
    fn of_slots(&self, slots: &[usize], anchors: &Tensor) -> Tensor {
        let tokens = self.tokens.index_select(0, &self.arange.int_tensor(slots.iter().copied()));
        tokens.where_self(&tokens.ge(0), anchors)
    }

    /// Forgets the token of a slot that another sequence takes.
    fn forget(&mut self, slot: usize) {
        let _ = self.tokens.narrow(0, slot as i64, 1).fill_(UNKNOWN);
    }
}

/// Inputs of the confidence head for drafted blocks.
pub struct ConfidenceInputs {
    /// Hidden states after the final norm of the slots that the heads read, `[S, H, d]`.
    pub hidden: Tensor,
    /// Embeddings of the tokens before each slot, `[S, γ, r]`.
    pub embeddings: Option<Tensor>,
}

impl<K: BackboneDrafter> BlockProposerOf<K> {
    /// A proposer with an empty KV cache for `slots` sequences.
    pub fn new(model: DraftModel<K>, slots: usize) -> Self {
        let cache = KvCache::new(&model.attention_specs(), slots, model.kind(), model.device());
        let last_tokens = K::Settings::READS_ANCHOR_SLOT.then(|| LastTokens {
            tokens: Tensor::full([slots as i64], UNKNOWN, (Kind::Int64, model.device())),
            arange: DeviceArange::new(model.device()),
        });
        Self { model, cache, last_tokens }
    }

    /// The model.
    pub fn model(&self) -> &DraftModel<K> {
        &self.model
    }

    /// Appends the context to the cache and runs one block per anchor, `anchors [S]`. For each slot k, `choose(k, logits)` picks tokens
    /// `[S]` from float32 logits `[S, V]`. Drafters that draft one slot after the other continue from them.
    pub fn forward(
        &mut self,
        context: &Context,
        slots: &[usize],
        anchors: &Tensor,
        mut choose: impl FnMut(i64, &Tensor) -> Tensor,
    ) -> ConfidenceInputs {
        let (hidden, before_anchors) = self.forward_blocks(context, slots, anchors);
        let states = BlockStates { hidden: &hidden, anchors, before_anchors: before_anchors.as_ref() };
        let embeddings = draft(&self.model, &states, &mut choose);
        ConfidenceInputs { hidden, embeddings }
    }

    /// Appends the context to the cache and runs one block per anchor. Returns `hidden` and `before_anchors` of [`BlockStates`].
    fn forward_blocks(
        &mut self,
        context: &Context,
        slots: &[usize],
        anchors: &Tensor,
    ) -> (Tensor, Option<Tensor>) {
        let context_chunks = self.cache.chunks_to_append(&context.chunks);
        let blocks = self.block_chunks(&context_chunks, slots);
        self.cache.reserve(&[context_chunks.as_slice(), &blocks].concat());
        if !context_chunks.is_empty() {
            self.append_context(context, &context_chunks, &self.cache.plan_write(&context_chunks));
            if let Some(last_tokens) = &mut self.last_tokens {
                last_tokens.update(context);
            }
        }
        let hidden = self.block_hidden_states(&blocks, anchors); // [S, H, d]
        let before_anchors =
            self.last_tokens.as_ref().map(|last_tokens| last_tokens.of_slots(slots, anchors));
        (hidden, before_anchors)
    }

    /// Chunk of each slot's block, after the context that is being appended.
    fn block_chunks(&self, context_chunks: &[Chunk], slots: &[usize]) -> Vec<Chunk> {
        let len = self.block_size();
        let block = |&slot: &usize| {
            let context = context_chunks.iter().find(|chunk| chunk.slot == slot);
            Chunk {
                slot,
                past_len: context.map_or_else(|| self.cache.len(slot), |chunk| chunk.past_len + chunk.len),
                len,
            }
        };
        slots.iter().map(block).collect()
    }

    /// Appends keys and values of newly committed tokens to the cache.
    fn append_context(&mut self, context: &Context, chunks: &[Chunk], rows: &PooledRows) {
        let rotations = self.model.rotations(rows.positions());
        let hidden = self.model.context_states(&context.captured_states);
        for (i, layer) in self.model.modules.backbone().layers.iter().enumerate() {
            let (k, v) = layer.attention.project_context(&hidden, rotations.layer(i));
            self.cache.write(i, rows, &k, &v);
        }
        self.cache.commit_chunks(chunks);
    }

    /// Hidden states `[S, H, d]` of blocks `[anchor, mask, …]`, after the final norm. The length of the cache does not include the blocks.
    fn block_hidden_states(&mut self, blocks: &[Chunk], anchors: &Tensor) -> Tensor {
        let plan = self.cache.plan(blocks, K::block_spec(self.model.config()).shape().mask);
        let rotations = self.model.planned_rotations(&plan);
        let (mask, size) = (K::block_spec(self.model.config()).mask_token_id, self.block_size() as i64);
        let distinct =
            Tensor::cat(&[anchors, &Tensor::full([1], mask, (anchors.kind(), anchors.device()))], 0);
        let distinct = self.model.embed(&distinct); // [S + 1, d]
        let repeat = |rows: &Tensor| repeat_over_blocks(rows, size);
        let mut x = repeat(&distinct); // [S·B, d]
        for (i, layer) in self.model.modules.backbone().layers.iter().enumerate() {
            let hook = self.model.modules.layer_hook(i);
            let repeated = match i == 0 && size > 1 && hook.is_none() {
                true => RepeatedRows::for_inference(&distinct, &repeat),
                false => None,
            };
            let input = LayerInput { x: &x, repeated, embeddings: None };
            x = layer.forward(input, rotations.layer(i), &mut self.cache.attention(i, &plan), hook);
        }
        self.model.head_slot_states(&x)
    }

    /// Slots of a block, B.
    fn block_size(&self) -> usize {
        K::block_spec(self.model.config()).block_size
    }
}

impl<K: BackboneDrafter> Drafter for BlockProposerOf<K> {
    fn share(&self, slots: usize) -> Box<dyn Drafter> {
        K::into_drafter(self.model.share(), slots)
    }

    fn taps(&self) -> &[Tap] {
        &self.model.config().decoder.taps
    }

    fn has_confidence_head(&self) -> bool {
        K::has_confidence_head(self.model.config())
    }

    fn draft_sampling(&self) -> DraftSampling {
        self.model.modules.draft_sampling()
    }

    fn disable_markov_bias(&mut self) -> bool {
        self.model.modules.disable_markov_bias()
    }

    fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError> {
        self.model.config().decoder.check_fits(target)
    }

    fn probe(&self) -> Option<Box<dyn DrafterProbe>> {
        Some(Box::new(self.model.share()))
    }
}

impl<K: BackboneDrafter> Proposer for BlockProposerOf<K> {
    fn draft_len(&self) -> usize {
        K::block_spec(self.model.config()).draft_len()
    }

    fn reads_hidden(&self) -> bool {
        false
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let DraftRequest { context, slots, anchors, .. } = *request;
        let (hidden, before_anchors) = self.forward_blocks(context, slots, anchors);
        let states = BlockStates { hidden: &hidden, anchors, before_anchors: before_anchors.as_ref() };
        propose(&self.model, &states, request)
    }

    fn tree_refusal(&self) -> Option<&'static str> {
        None
    }

    fn propose_trees(
        &mut self,
        request: &DraftRequest,
        budget: TreeBudget,
        max_depth: usize,
    ) -> Vec<DraftTree> {
        let DraftRequest { context, slots, anchors, sampling, .. } = *request;
        let (hidden, before_anchors) = self.forward_blocks(context, slots, anchors);
        let states = BlockStates { hidden: &hidden, anchors, before_anchors: before_anchors.as_ref() };
        grow_trees(&self.model, &states, budget, max_depth, |row| sampling.ranking_temperature(row))
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.cache.truncate(slot, len);
        if let Some(last_tokens) = &mut self.last_tokens {
            last_tokens.forget(slot);
        }
    }

    fn kv_cache_bytes(&self, tokens: usize) -> u64 {
        let idle = K::block_spec(self.model.config()).slots.first_drafting_position();
        self.cache.kv_cache_bytes(tokens + idle) as u64
    }

    fn free_cached_memory(&mut self) {
        self.cache.free_cached_memory();
    }
}
