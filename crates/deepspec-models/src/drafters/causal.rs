//! Classic speculative decoding: a smaller causal language model drafts its own continuation, token by token.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use deepspec_core::cli::UsageError;
use deepspec_decode::{Context, DraftRequest, Feed, Proposal, Proposer, Target};
use tch::Tensor;

use super::{DrafterOptions, token_by_token};
use crate::{ModelConfig, ModelError, TargetModel, TargetOptions};

/// Tokens per proposal unless another number is wanted: as many as the recipes' block drafters propose.
const BLOCK_SIZE: usize = 7;

/// A causal language model with histories of committed tokens.
pub struct CausalProposer {
    model: TargetModel,
    block_size: usize,
    /// Committed tokens in each slot's history; the anchor is none of them.
    held: Vec<usize>,
}

impl CausalProposer {
    /// Loads the language model in `dir`.
    ///
    /// # Errors
    /// As [`TargetModel::load`].
    pub fn load(dir: &Path, options: &DrafterOptions) -> Result<Self, ModelError> {
        let DrafterOptions { device, kind, slots } = *options;
        let model = TargetModel::load(dir, &TargetOptions { device, kind, slots, taps: vec![] })?;
        Ok(Self { model, block_size: BLOCK_SIZE, held: vec![0; slots] })
    }

    /// The model.
    pub fn model(&self) -> &TargetModel {
        &self.model
    }

    /// Whether this model's tokens can be the target's, judged by their configs.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] with both vocabularies.
    pub fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError> {
        let (found, expected) = (self.model.config().vocab_size, target.vocab_size);
        if found == expected {
            return Ok(());
        }
        Err(ModelError::Mismatch(UsageError(format!(
            "the drafter does not belong to this target: it has {found} tokens, the target {expected}; a language model \
             drafts for targets of its own tokenizer"
        ))))
    }

    /// Proposes `tokens` per block from now on.
    pub fn draft(&mut self, tokens: usize) {
        self.block_size = tokens;
    }

    /// Runs the tokens that were committed since the last proposal and the anchors behind them: states `[S, d]` after the
    /// anchors.
    fn take_in(&mut self, context: &Context, slots: &[usize], anchors: &Tensor) -> Tensor {
        let committed: usize = context.chunks.iter().map(|&(_, rows)| rows).sum();
        let new = rows_by_slot(&context.chunks);
        let (mut chunks, mut rows, mut ends) = (vec![], vec![], vec![]);
        for (i, &slot) in slots.iter().enumerate() {
            let new = new.get(&slot).cloned().unwrap_or_default();
            self.held[slot] += new.len();
            chunks.push((slot, new.len() + 1));
            rows.extend(new.map(|row| row as i64).chain([(committed + i) as i64]));
            ends.push(rows.len() as i64 - 1);
        }
        let index = |rows: &[i64]| Tensor::from_slice(rows).to_device(self.model.device());
        let tokens = match committed {
            0 => anchors.shallow_clone(),
            _ => Tensor::cat(&[&context.tokens, anchors], 0).index_select(0, &index(&rows)),
        };
        let ends = index(&ends);
        self.model.forward(&Feed { chunks: &chunks, tokens }).hidden.index_select(0, &ends)
    }
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

impl Proposer for CausalProposer {
    fn block_size(&self) -> usize {
        self.block_size
    }

    fn ends_at_stop_tokens(&self) -> bool {
        true
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let slots = request.slots;
        let mut states = self.take_in(request.context, slots, request.anchors);
        let chunks: Vec<(usize, usize)> = slots.iter().map(|&slot| (slot, 1)).collect();
        let model = &mut self.model;
        let proposal = token_by_token(request, self.block_size, |last| {
            if let Some(token) = last {
                states = model.forward(&Feed { chunks: &chunks, tokens: token.shallow_clone() }).hidden;
            }
            model.logits(&states)
        });
        // The anchor and what was drafted come back once the target has judged them.
        slots.iter().for_each(|&slot| self.model.truncate(slot, self.held[slot]));
        proposal
    }

    fn reset(&mut self, slot: usize) {
        self.held[slot] = 0;
        self.model.truncate(slot, 0);
    }
}
