//! Classic speculative decoding: a smaller causal language model drafts its own continuation, token by token.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use deepspec_core::cli::UsageError;
use deepspec_engine::{Context, DraftRequest, DraftSampling, Proposal, Proposer, Target};
use deepspec_models::{ModelConfig, ModelError, TargetModel, TargetOptions, families};
use deepspec_ops::kv_attention::Chunk;
use deepspec_ops::runs;
use tch::Tensor;

use crate::drafter::token_by_token;
use crate::registration::{Checkpoints, DrafterKindInfo};
use crate::{Drafter, DrafterOptions};

/// A smaller causal language model of the same vocabulary.
pub const KIND: DrafterKindInfo = DrafterKindInfo {
    name: "causal",
    title: "a causal language model",
    parts: &[],
    settings: None,
    checkpoints: Some(Checkpoints {
        classes: || families().flat_map(|family| family.classes).map(|class| class.to_string()).collect(),
        hold: "a causal language model",
        are_language_models: true,
        check: |dir| ModelConfig::load(dir).map(drop),
        load: |dir, options| Ok(Box::new(CausalProposer::load(dir, options)?)),
        layouts: None,
    }),
};

/// Tokens per proposal unless another number is wanted: as many as the recipes' block drafters propose.
const BLOCK_SIZE: usize = 7;

/// A causal language model with histories of committed tokens.
pub struct CausalProposer {
    model: TargetModel,
    block_size: usize,
    /// Committed tokens in each slot's history; the anchor is none of them.
    past_len: Vec<usize>,
}

impl CausalProposer {
    /// Loads the language model in `dir`.
    ///
    /// # Errors
    /// As [`TargetModel::load`].
    pub fn load(dir: &Path, options: &DrafterOptions) -> Result<Self, ModelError> {
        let DrafterOptions { device, kind, slots } = *options;
        let model = TargetModel::load(dir, &TargetOptions { device, kind, slots, taps: vec![] })?;
        Ok(Self::new(model, slots))
    }

    fn new(model: TargetModel, slots: usize) -> Self {
        Self { model, block_size: BLOCK_SIZE, past_len: vec![0; slots] }
    }

    /// Chunks to run: the tokens committed since the last proposal, and the anchors behind them.
    fn news(&self, context: &Context, slots: &[usize]) -> News {
        let committed: usize = context.chunks.iter().map(|&(_, rows)| rows).sum();
        let new = rows_by_slot(&context.chunks);
        let (mut chunks, mut rows, mut ends, mut end) = (vec![], vec![], vec![], 0);
        for (i, &slot) in slots.iter().enumerate() {
            let new = new.get(&slot).cloned().unwrap_or_default();
            chunks.push(Chunk { slot, past_len: self.past_len[slot], len: new.len() + 1 });
            rows.extend([(new.start as i64, new.len() as i64), ((committed + i) as i64, 1)]);
            end += new.len() as i64 + 1;
            ends.push((end - 1, 1));
        }
        News { chunks, rows, ends }
    }
}

/// Committed tokens that the drafter has not seen, slot by slot, each with its anchor behind them.
struct News {
    chunks: Vec<Chunk>,
    /// Their runs among committed tokens and anchors.
    rows: Vec<(i64, i64)>,
    /// The anchors' places among them, runs of one.
    ends: Vec<(i64, i64)>,
}

/// The rows of each slot's chunk.
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

    fn draft(&mut self, tokens: usize) {
        self.block_size = tokens;
    }
}

impl Proposer for CausalProposer {
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
        let DraftRequest { context, slots, anchors, .. } = *request;
        let news = self.news(context, slots);
        let drafted = |k: usize| {
            news.chunks
                .iter()
                .map(|chunk| Chunk { past_len: chunk.past_len + chunk.len + k, len: 1, ..*chunk })
                .collect()
        };
        let mut feeds: Vec<Vec<Chunk>> = vec![news.chunks.clone()];
        feeds.extend((0..self.block_size.saturating_sub(1)).map(drafted));
        self.model.reserve(&feeds.concat());
        let tokens = match context.chunks.as_slice() {
            [] => anchors.shallow_clone(),
            _ => runs(&Tensor::cat(&[&context.tokens, anchors], 0), news.rows),
        };
        let model = &mut self.model;
        let mut states = runs(&model.run(&feeds[0], &tokens).hidden, news.ends);
        let mut drafted = feeds[1..].iter();
        let proposal = token_by_token(request, self.block_size, |last| {
            if let Some(token) = last
                && let Some(chunks) = drafted.next()
            {
                states = model.run(chunks, token).hidden;
            }
            model.logits(&states)
        });
        for chunk in &news.chunks {
            self.past_len[chunk.slot] = chunk.past_len + chunk.len - 1;
        }
        // The anchor and what was drafted come back once the target has judged them.
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
