//! Drafting with DSpark of DeepSeek-V4. The latents of the context are computed once per committed token, and kept.

use deepspec_core::Tap;
use deepspec_engine::{Context, DraftRequest, DraftSampling, Proposal, Proposer, TreeBudget};
use deepspec_models::{ModelConfig, ModelError};
use deepspec_ops::DraftTree;
use tch::{Kind, Tensor};

use super::attention::PairRotation;
use super::model::{DSparkV4, DSparkV4Modules};
use crate::block_common::{BlockDrafter as _, BlockStates, grow_trees, propose};
use crate::draft_model::DrafterKind as _;
use crate::{Drafter, DrafterProbe};

/// Fewest tokens for which a slot's memory is allocated.
const MIN_CAPACITY: usize = 256;

/// Latents of a sequence's context.
#[derive(Default)]
struct SlotLatents {
    /// `[stages, capacity, D]`; None before the first token.
    rows: Option<Tensor>,
    /// Number of tokens.
    len: usize,
}

impl SlotLatents {
    /// Appends latents `[stages, n, D]`.
    fn append(&mut self, latents: &Tensor) {
        let (added, len) = (latents.size()[1] as usize, self.len);
        let end = len + added;
        if self.rows.as_ref().is_none_or(|rows| rows.size()[1] < end as i64) {
            let [stages, _, width] = latents.size()[..] else { unreachable!("three dims") };
            let shape = [stages, end.next_power_of_two().max(MIN_CAPACITY) as i64, width];
            let grown = Tensor::empty(shape, (latents.kind(), latents.device()));
            if let Some(rows) = &self.rows {
                grown.narrow(1, 0, len as i64).copy_(&rows.narrow(1, 0, len as i64));
            }
            self.rows = Some(grown);
        }
        if let Some(rows) = &self.rows {
            rows.narrow(1, len as i64, added as i64).copy_(latents);
        }
        self.len = end;
    }

    /// The last latents of a stage, at most `window`: `[K, D]`; None for an empty context.
    fn last(&self, stage: usize, window: i64) -> Option<Tensor> {
        let (len, rows) = (self.len as i64, self.rows.as_ref()?);
        let count = window.min(len);
        (count > 0).then(|| rows.get(stage as i64).narrow(0, len - count, count))
    }
}

/// A DSpark drafter of DeepSeek-V4 with the latents of its sequences.
pub struct DSparkV4Proposer {
    model: DSparkV4,
    slots: Vec<SlotLatents>,
}

impl DSparkV4Proposer {
    /// A proposer with empty contexts for `slots` sequences.
    pub fn new(model: DSparkV4, slots: usize) -> Self {
        Self { model, slots: (0..slots).map(|_| SlotLatents::default()).collect() }
    }

    /// The model.
    pub fn model(&self) -> &DSparkV4 {
        &self.model
    }

    /// Appends the context, and runs one block per anchor: hidden states `[S, B, d]` before the final norm.
    fn forward_blocks(&mut self, context: &Context, slots: &[usize], anchors: &Tensor) -> Tensor {
        if !context.chunks.is_empty() {
            self.append_context(context);
        }
        let (settings, blocks) = (self.model.stage_settings(), &self.model.config().settings.blocks);
        let (size, window) = (blocks.block_size as i64, settings.sliding_window);
        let device = anchors.device();
        let starts: Vec<i64> = slots.iter().map(|&slot| self.slots[slot].len as i64).collect();
        let starts = Tensor::from_slice(&starts).to_device(device);
        let within = Tensor::arange(size, (Kind::Int64, device));
        let rotation = PairRotation::new(&(starts.unsqueeze(1) + within).flatten(0, 1), settings);
        let masks = Tensor::full([slots.len() as i64, size - 1], blocks.mask_token_id, (Kind::Int64, device));
        let tokens = Tensor::cat(&[anchors.unsqueeze(1), masks], 1).flatten(0, 1);
        let mut streams = self.model.initial_streams(&tokens);
        for (i, stage) in self.model.modules.stages.iter().enumerate() {
            streams = stage.forward(&streams, &rotation, |queries, own| {
                // Sequence by sequence, so that a sequence's result does not depend on others.
                let of_slot = |(at, &slot): (usize, &usize)| {
                    let block = |all: &Tensor| all.narrow(0, at as i64 * size, size);
                    let context = self.slots[slot].last(i, window);
                    let latents = context.into_iter().chain([block(own)]).collect::<Vec<_>>();
                    let latents = Tensor::cat(&latents, 0).unsqueeze(0);
                    stage.attention.attend(&block(queries).unsqueeze(0), &latents, None).squeeze_dim(0)
                };
                Tensor::cat(&slots.iter().enumerate().map(of_slot).collect::<Vec<_>>(), 0)
            });
        }
        self.model.read_streams(&streams)
    }

    /// Appends the latents of newly committed tokens.
    fn append_context(&mut self, context: &Context) {
        let positions: Vec<i64> = context
            .chunks
            .iter()
            .flat_map(|&(slot, rows)| {
                let len = self.slots[slot].len as i64;
                len..len + rows as i64
            })
            .collect();
        let positions = Tensor::from_slice(&positions).to_device(self.model.device());
        let rotation = PairRotation::new(&positions, self.model.stage_settings());
        let states = self.model.context_states(&context.captured_states);
        let stages = self.model.modules.stages.iter();
        let latents: Vec<Tensor> = stages.map(|stage| stage.attention.latents(&states, &rotation)).collect();
        let latents = Tensor::stack(&latents, 0);
        let mut first = 0;
        for &(slot, rows) in &context.chunks {
            self.slots[slot].append(&latents.narrow(1, first, rows as i64));
            first += rows as i64;
        }
    }
}

impl Drafter for DSparkV4Proposer {
    fn share(&self, slots: usize) -> Box<dyn Drafter> {
        DSparkV4Modules::into_drafter(self.model.share(), slots)
    }

    fn taps(&self) -> &[Tap] {
        &self.model.config().decoder.taps
    }

    fn has_confidence_head(&self) -> bool {
        true
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

impl Proposer for DSparkV4Proposer {
    fn draft_len(&self) -> usize {
        self.model.config().settings.blocks.draft_len()
    }

    fn reads_hidden(&self) -> bool {
        false
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let DraftRequest { context, slots, anchors, .. } = *request;
        let hidden = self.forward_blocks(context, slots, anchors);
        propose(&self.model, &BlockStates { hidden: &hidden, anchors, before_anchors: None }, request)
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
        let hidden = self.forward_blocks(context, slots, anchors);
        let states = BlockStates { hidden: &hidden, anchors, before_anchors: None };
        grow_trees(&self.model, &states, budget, max_depth, |row| sampling.ranking_temperature(row))
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        let own = &mut self.slots[slot];
        own.len = own.len.min(len);
    }

    fn kv_cache_bytes(&self, tokens: usize) -> u64 {
        let rows = tokens.next_power_of_two().max(MIN_CAPACITY) * self.model.modules.stages.len();
        let width = self.model.stage_settings().head_dim as usize;
        (rows * width * self.model.kind().elt_size_in_bytes()) as u64
    }

    fn free_cached_memory(&mut self) {
        for slot in self.slots.iter_mut().filter(|slot| slot.len == 0) {
            slot.rows = None;
        }
    }
}
