//! Drafting with an assistant, over a cache of its target's keys and values.

use std::path::Path;

use deepspec_core::Tap;
use deepspec_core::cli::UsageError;
use deepspec_engine::{DraftRequest, DraftSampling, Proposal, Proposer};
use deepspec_models::nn::Qkv;
use deepspec_models::{ModelConfig, ModelError};
use deepspec_ops::Attend;
use deepspec_ops::kv_attention::{AttentionPlan, Chunk, KvCache, MaskKind};
use tch::Tensor;

use super::model::Assistant;
use super::probe::AssistantProbe;
use crate::drafter::{TREE_REFUSAL, draft_autoregressively};
use crate::token_common::LastStates;
use crate::{Drafter, DrafterOptions, DrafterProbe};

/// Default number of drafted tokens, as of other drafters. An assistant drafts any number.
const DEFAULT_DRAFT_LEN: usize = 7;

/// An assistant with a cache of its target's keys and values.
pub struct AssistantProposer {
    model: Assistant,
    draft_len: usize,
    /// Keys and values of committed tokens, one layer per source.
    cache: KvCache,
    /// Final states of the target at the last committed tokens.
    states: LastStates,
    /// Captured states of the target at the last committed tokens.
    captured: LastStates,
}

impl AssistantProposer {
    /// Loads the assistant in `dir`.
    ///
    /// # Errors
    /// As [`Assistant::load`], and if the options name no target.
    pub fn load(dir: &Path, options: &DrafterOptions) -> Result<Self, ModelError> {
        let DrafterOptions { device, kind, slots, target } = options;
        let Some(target) = target else {
            let problem = format!(
                "{}: an assistant of Gemma 4 is read beside its target, and no target was named",
                dir.display()
            );
            return Err(ModelError::Mismatch(UsageError(problem)));
        };
        Ok(Self::new(Assistant::load(dir, target, *device, *kind)?, *slots))
    }

    /// A proposer with an empty cache for `slots` sequences.
    pub(super) fn new(model: Assistant, slots: usize) -> Self {
        let (kind, device) = model.options();
        let width = model.backbone_hidden_size();
        Self {
            cache: KvCache::new(&model.attention_specs(), slots, kind, device),
            states: LastStates::new(slots, width, kind, device),
            captured: LastStates::new(slots, width * model.taps().len() as i64, kind, device),
            draft_len: DEFAULT_DRAFT_LEN,
            model,
        }
    }

    /// Appends keys and values of newly committed tokens.
    fn append_context(&mut self, request: &DraftRequest) {
        let context = request.context;
        let chunks = self.cache.chunks_to_append(&context.chunks);
        if chunks.is_empty() {
            return;
        }
        self.cache.reserve(&chunks);
        let rows = self.cache.plan_write(&chunks);
        let keys_values = self.model.keys_values(&context.captured_states, rows.positions());
        for (source, (k, v)) in keys_values.iter().enumerate() {
            self.cache.write(source, &rows, k, v);
        }
        self.cache.commit_chunks(&chunks);
        let states =
            context.hidden.as_ref().expect("the engine keeps the states that `reads_hidden` asks for");
        self.states.update(context, states);
        self.captured.update(context, &context.captured_states);
    }

    /// Plans the attention of one query per slot to all its keys, and returns the keys and values of each slot's last token. Attention
    /// stores these again, because a query has no keys of its own.
    fn plan_queries(&mut self, slots: &[usize]) -> (AttentionPlan, Vec<(Tensor, Tensor)>) {
        // A slot whose context was dropped for want of memory has no keys; its query sees one that means nothing.
        let chunk = |&slot: &usize| Chunk { slot, past_len: self.cache.len(slot).saturating_sub(1), len: 1 };
        let chunks: Vec<Chunk> = slots.iter().map(chunk).collect();
        self.cache.reserve(&chunks);
        let plan = self.cache.plan(&chunks, MaskKind::Causal);
        let last = self.model.keys_values(&self.captured.of_slots(slots), plan.positions());
        (plan, last)
    }
}

impl Drafter for AssistantProposer {
    fn share(&self, slots: usize) -> Box<dyn Drafter> {
        Box::new(Self::new(self.model.share(), slots))
    }

    fn taps(&self) -> &[Tap] {
        self.model.taps()
    }

    fn draft_sampling(&self) -> DraftSampling {
        DraftSampling::Probabilistic
    }

    fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError> {
        self.model.check_fits(target)
    }

    fn set_draft_len(&mut self, tokens: usize) {
        self.draft_len = tokens;
    }

    fn probe(&self) -> Option<Box<dyn DrafterProbe>> {
        Some(Box::new(AssistantProbe { model: self.model.share(), draft_len: self.draft_len }))
    }
}

impl Proposer for AssistantProposer {
    fn draft_len(&self) -> usize {
        self.draft_len
    }

    fn ends_at_stop_tokens(&self) -> bool {
        true
    }

    fn reads_hidden(&self) -> bool {
        true
    }

    fn tree_refusal(&self) -> Option<&'static str> {
        TREE_REFUSAL
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        self.append_context(request);
        let (plan, last) = self.plan_queries(request.slots);
        // All drafts have the position of the anchor, as in transformers and llama.cpp.
        let rotations = self.model.query_rotations(&(plan.positions() + 1));
        let (model, cache) = (&self.model, &mut self.cache);
        let mut attend = |source: usize, queries: &Qkv| {
            let (k, v) = &last[source];
            let (q, k, v) = (queries.q.shallow_clone(), k.shallow_clone(), v.shallow_clone());
            cache.attention(source, &plan).attend(&Qkv { q, k, v, sinks: None })
        };
        let mut states = self.states.of_slots(request.slots);
        draft_autoregressively(request, self.draft_len, |drafted| {
            let tokens = drafted.unwrap_or(request.anchors);
            let (logits, next) = model.step(tokens, &states, &rotations, &mut attend);
            states = next;
            logits
        })
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
