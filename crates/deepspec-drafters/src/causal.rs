//! Classic speculative decoding: a smaller causal language model drafts token by token.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use deepspec_checkpoint::Engine;
use deepspec_core::cli::UsageError;
use deepspec_engine::{Context, DraftRequest, DraftSampling, Proposal, Proposer, Target};
use deepspec_models::{ModelConfig, ModelError, TargetModel, TargetOptions, families};
use deepspec_ops::{cat_row_runs, kv_attention::Chunk};
use tch::Tensor;

use crate::drafter::{TREE_REFUSAL, draft_autoregressively};
use crate::registration::{CheckpointKind, DrafterKindInfo};
use crate::{Drafter, DrafterOptions};

/// Registry entry of causal language models, which draft for targets with the same vocabulary.
pub const CAUSAL_INFO: DrafterKindInfo = DrafterKindInfo {
    name: "causal",
    title: "a causal language model",
    param_groups: &[],
    settings: None,
    checkpoints: Some(CheckpointKind {
        classes: || families().flat_map(|family| family.classes).map(|class| class.to_string()).collect(),
        description: "a causal language model",
        are_language_models: true,
        tree_refusal: TREE_REFUSAL,
        check: |dir| check_layers(&ModelConfig::load(dir)?),
        load: |dir, options| Ok(Box::new(CausalProposer::load(dir, options)?)),
        layouts: None,
        engines: &Engine::ALL,
    }),
};

/// Default number of drafted tokens, as in the recipes of block drafters.
const DEFAULT_DRAFT_LEN: usize = 7;

/// Checks that the model forgets drafts that ran one by one. The states of linear attention roll back within the last forward only.
fn check_layers(config: &ModelConfig) -> Result<(), ModelError> {
    if config.layers.iter().all(|layer| layer.gated_delta.is_none()) {
        return Ok(());
    }
    let family = config.family;
    Err(ModelError::Mismatch(UsageError(format!(
        "{family} is a target here and no drafter: its linear attention cannot take back drafts one by one"
    ))))
}

/// A causal language model that drafts, with one KV cache per slot.
pub struct CausalProposer {
    model: TargetModel,
    draft_len: usize,
    /// Number of committed tokens in each slot's KV cache, without the anchor.
    past_len: Vec<usize>,
}

impl CausalProposer {
    /// Loads the language model in `dir`.
    ///
    /// # Errors
    /// As [`TargetModel::load`], and if the model has layers with linear attention.
    pub fn load(dir: &Path, options: &DrafterOptions) -> Result<Self, ModelError> {
        let DrafterOptions { device, kind, slots, .. } = *options;
        check_layers(&ModelConfig::load(dir)?)?;
        let model = TargetModel::load(dir, &TargetOptions { device, kind, slots, taps: vec![] })?;
        Ok(Self::new(model, slots))
    }

    fn new(model: TargetModel, slots: usize) -> Self {
        Self { model, draft_len: DEFAULT_DRAFT_LEN, past_len: vec![0; slots] }
    }

    /// Chunks to run, one per slot: the tokens committed since the last proposal, then the anchor.
    fn new_chunks(&self, context: &Context, slots: &[usize]) -> NewChunks {
        let committed: usize = context.chunks.iter().map(|&(_, rows)| rows).sum();
        let new = rows_by_slot(&context.chunks);
        let (mut chunks, mut row_runs, mut anchors, mut end) = (vec![], vec![], vec![], 0);
        for (i, &slot) in slots.iter().enumerate() {
            let new = new.get(&slot).cloned().unwrap_or_default();
            chunks.push(Chunk { slot, past_len: self.past_len[slot], len: new.len() + 1 });
            row_runs.extend([(new.start as i64, new.len() as i64), ((committed + i) as i64, 1)]);
            end += new.len() as i64 + 1;
            anchors.push((end - 1, 1));
        }
        NewChunks { chunks, row_runs, anchors }
    }
}

/// Chunks of committed tokens that the drafter has not run, one per slot, each with the anchor at its end.
struct NewChunks {
    chunks: Vec<Chunk>,
    /// The chunks' tokens as runs (first row, number of rows) in the concatenation of committed tokens and anchors.
    row_runs: Vec<(i64, i64)>,
    /// The anchors as runs of one row among the chunks' tokens.
    anchors: Vec<(i64, i64)>,
}

/// Range of the rows of each slot's chunk.
fn rows_by_slot(chunks: &[(usize, usize)]) -> BTreeMap<usize, Range<usize>> {
    let mut end = 0;
    let chunk = |&(slot, rows): &(usize, usize)| {
        end += rows;
        (slot, end - rows..end)
    };
    chunks.iter().map(chunk).collect()
}

impl Drafter for CausalProposer {
    fn share(&self, slots: usize) -> Box<dyn Drafter> {
        Box::new(Self::new(self.model.share(slots), slots))
    }

    fn draft_sampling(&self) -> DraftSampling {
        DraftSampling::Probabilistic
    }

    fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError> {
        let (found, expected) = (self.model.config().vocab_size, target.vocab_size);
        if found == expected {
            return Ok(());
        }
        Err(ModelError::Mismatch(UsageError(format!(
            "the drafter does not belong to this target: it has {found} tokens, the target {expected}; a language model \
             drafts for targets of its own tokenizer"
        ))))
    }

    fn set_draft_len(&mut self, tokens: usize) {
        self.draft_len = tokens;
    }
}

impl Proposer for CausalProposer {
    fn draft_len(&self) -> usize {
        self.draft_len
    }

    fn ends_at_stop_tokens(&self) -> bool {
        true
    }

    fn reads_hidden(&self) -> bool {
        false
    }

    fn tree_refusal(&self) -> Option<&'static str> {
        TREE_REFUSAL
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let DraftRequest { context, slots, anchors, .. } = *request;
        let new = self.new_chunks(context, slots);
        let draft_chunks = |k: usize| {
            new.chunks
                .iter()
                .map(|chunk| Chunk { past_len: chunk.past_len + chunk.len + k, len: 1, ..*chunk })
                .collect()
        };
        let mut feeds: Vec<Vec<Chunk>> = vec![new.chunks.clone()];
        feeds.extend((0..self.draft_len.saturating_sub(1)).map(draft_chunks));
        self.model.reserve(&feeds.concat());
        let tokens = match context.chunks.as_slice() {
            [] => anchors.shallow_clone(),
            _ => cat_row_runs(&Tensor::cat(&[&context.tokens, anchors], 0), new.row_runs),
        };
        let model = &mut self.model;
        let mut states = cat_row_runs(&model.run(&feeds[0], &tokens).hidden, new.anchors);
        let mut draft_chunks = feeds[1..].iter();
        let proposal = draft_autoregressively(request, self.draft_len, |last| {
            if let Some(token) = last
                && let Some(chunks) = draft_chunks.next()
            {
                states = model.run(chunks, token).hidden;
            }
            model.logits(&states)
        });
        for chunk in &new.chunks {
            self.past_len[chunk.slot] = chunk.past_len + chunk.len - 1;
        }
        // Drops the anchor and the drafts; the next proposal runs the accepted ones again.
        slots.iter().for_each(|&slot| self.model.truncate(slot, self.past_len[slot]));
        proposal
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.past_len[slot] = self.past_len[slot].min(len);
        self.model.truncate(slot, len);
    }

    fn kv_cache_bytes(&self, tokens: usize) -> u64 {
        self.model.kv_cache_bytes(tokens)
    }

    fn free_cached_memory(&mut self) {
        self.model.free_cached_memory();
    }
}
