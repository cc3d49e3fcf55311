//! Drafting of P-EAGLE: all tokens of a block, or the distributions of a tree, in one pass.
//!
//! Behind the rows of newly committed tokens, a pass has γ − 1 masked rows per sequence. The last committed token's row drafts the first
//! token, and each masked row one more. Shapes: C committed rows, N rows of
//! the pass, S slots, γ drafts, d hidden size.

use deepspec_core::Tap;
use deepspec_engine::{DraftRequest, DraftSampling, Proposal, Proposer, TreeBudget};
use deepspec_models::{ModelConfig, ModelError};
use deepspec_ops::kv_attention::{Chunk, KvCache, MaskKind};
use deepspec_ops::{DraftTree, cat_row_runs};
use tch::{Kind, Tensor};

use super::model::PEagle;
use crate::block_common::grow_by_slot;
use crate::draft_model::DrafterSettings as _;
use crate::token_common::LastStates;
use crate::{Drafter, DrafterProbe};

/// A P-EAGLE drafter with a KV cache of committed tokens.
pub struct PEagleProposer {
    model: PEagle,
    draft_len: usize,
    cache: KvCache,
    last: LastStates,
}

/// Rows of a pass, as runs (first row, count).
#[derive(Default)]
struct DraftPass {
    chunks: Vec<Chunk>,
    /// Number of rows.
    count: i64,
    /// Input of each row: among the C committed rows, and γ − 1 equal masked rows behind them.
    inputs: Vec<(i64, i64)>,
    /// Committed rows of the pass, in the order of the context.
    committed: Vec<(i64, i64)>,
    /// Masked rows of each slot of the request, in its order.
    masked: Vec<(i64, i64)>,
}

impl DraftPass {
    /// Appends rows with these inputs, and returns their run in the pass.
    fn push(&mut self, inputs: (i64, i64)) -> (i64, i64) {
        let run = (self.count, inputs.1);
        self.count += inputs.1;
        self.inputs.push(inputs);
        run
    }
}

impl PEagleProposer {
    /// A proposer with an empty KV cache for `slots` sequences.
    pub fn new(model: PEagle, slots: usize) -> Self {
        let (kind, device) = (model.kind(), model.device());
        Self {
            draft_len: model.config().settings.draft_len(),
            cache: KvCache::new(&model.attention_specs(), slots, kind, device),
            last: LastStates::new(slots, model.config().model().hidden_size, kind, device),
            model,
        }
    }

    /// The model.
    pub fn model(&self) -> &PEagle {
        &self.model
    }

    /// Rows of the pass: the committed rows of each slot, and its masked rows if it drafts.
    fn pass_rows(&self, request: &DraftRequest) -> DraftPass {
        let context = self.cache.chunks_to_append(&request.context.chunks);
        let count: usize = context.iter().map(|chunk| chunk.len).sum();
        let masked_len = self.draft_len.saturating_sub(1);
        let idle = |slot: &&usize| context.iter().all(|chunk| chunk.slot != **slot);
        let without_context = request.slots.iter().filter(idle);
        let without_context =
            without_context.map(|&slot| Chunk { slot, past_len: self.cache.len(slot), len: 0 });
        let mut rows = DraftPass { masked: vec![(0, 0); request.slots.len()], ..DraftPass::default() };
        let mut first = 0;
        for mut chunk in context.iter().copied().chain(without_context) {
            if chunk.len > 0 {
                let run = rows.push((first, chunk.len as i64));
                rows.committed.push(run);
                first += chunk.len as i64;
            }
            if let Some(at) = request.slots.iter().position(|&slot| slot == chunk.slot) {
                rows.masked[at] = rows.push((count as i64, masked_len as i64));
                chunk.len += masked_len;
            }
            if chunk.len > 0 {
                rows.chunks.push(chunk);
            }
        }
        rows
    }

    /// States of the pass's rows, `[N, d]`, before the final norm. Writes keys and values to the cache.
    fn run(&mut self, request: &DraftRequest, rows: &DraftPass) -> Tensor {
        let (model, masked_len) = (&self.model, self.draft_len as i64 - 1);
        let mask_token_id = model.config().settings.mask_token_id;
        let mask = Tensor::full([1], mask_token_id, (Kind::Int64, model.device()));
        let (mut states, mut tokens) = (vec![], vec![]);
        if !rows.committed.is_empty() {
            states.push(model.fuse_captured(&request.context.captured_states));
            tokens.push(request.context.next.shallow_clone());
        }
        states.push(model.masked_state().repeat([masked_len, 1]));
        tokens.push(mask.repeat([masked_len]));
        let inputs = |of: &Tensor| cat_row_runs(of, rows.inputs.iter().copied());
        let states = inputs(&Tensor::cat(&states, 0));
        let embeddings = inputs(&model.embed(&Tensor::cat(&tokens, 0)));
        let plan = self.cache.plan(&rows.chunks, MaskKind::Causal);
        let rotations = model.planned_rotations(&plan);
        let layers = 0..model.config().model().layers.len();
        layers.fold(states, |states, i| {
            let mut attention = self.cache.attention(i, &plan);
            model.forward_layer(i, &states, &embeddings, rotations.layer(i), &mut attention)
        })
    }

    /// Appends the context to the cache, and computes the float32 logits of all drafts in one pass, `[S, γ, V]`.
    fn draft_logits(&mut self, request: &DraftRequest) -> Tensor {
        let rows = self.pass_rows(request);
        self.cache.reserve(&rows.chunks);
        let context_chunks = self.cache.chunks_to_append(&request.context.chunks);
        let mut masked = None;
        if rows.count > 0 {
            let states = self.run(request, &rows);
            // Masked rows leave the cache, whose lengths count committed tokens only.
            self.cache.commit_chunks(&context_chunks);
            let select = |runs: &[(i64, i64)]| cat_row_runs(&states, runs.iter().copied());
            if !rows.committed.is_empty() {
                self.last.update(request.context, &select(&rows.committed));
            }
            let shape = [request.slots.len() as i64, self.draft_len as i64 - 1, states.size()[1]];
            masked = Some(select(&rows.masked).view(shape));
        }
        let mut states = vec![self.last.of_slots(request.slots).unsqueeze(1)];
        states.extend(masked);
        self.model.draft_logits(&Tensor::cat(&states, 1))
    }
}

impl Drafter for PEagleProposer {
    fn share(&self, slots: usize) -> Box<dyn Drafter> {
        Box::new(Self::new(self.model.share(), slots))
    }

    fn taps(&self) -> &[Tap] {
        &self.model.config().decoder.taps
    }

    /// The drafts of a pass do not depend on each other.
    fn draft_sampling(&self) -> DraftSampling {
        DraftSampling::Greedy
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

impl Proposer for PEagleProposer {
    fn draft_len(&self) -> usize {
        self.draft_len
    }

    fn reads_hidden(&self) -> bool {
        false
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let logits = self.draft_logits(request);
        let draw = |k: i64| request.sampling.sample(&logits.select(1, k), &request.uniforms.select(1, k));
        Proposal::stack((0..self.draft_len as i64).map(draw).collect(), None)
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
        let logits = self.draft_logits(request);
        let max_depth = max_depth.min(self.draft_len);
        let grow = |s: usize| {
            let temperature = request.sampling.ranking_temperature(s);
            grow_by_slot(&logits.get(s as i64), temperature, budget, max_depth)
        };
        (0..request.slots.len()).map(grow).collect()
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
