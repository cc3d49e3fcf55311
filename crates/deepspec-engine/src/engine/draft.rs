//! Drafting, and the number of drafted tokens to verify.

use deepspec_cost::planner::StepLoad;
use deepspec_ops::{DraftTree, cat_row_runs};
use tch::{Kind, Tensor};

use super::{Drafts, Engine, MAX_PREFILL_TOKENS, StepInputs, to_host};
use crate::{Context, DraftRequest, DraftSampling, Proposal, Proposer, Target};

impl<T: Target, P: Proposer> Engine<T, P> {
    /// Drafts blocks or trees for all decoding slots and returns how many tokens of each to verify. None if
    /// there is no drafter or no decoding slot, or if the planner expects no gain from drafting.
    pub(super) fn draft(&mut self, decoding: &[usize], inputs: &StepInputs) -> Option<(Drafts, Vec<usize>)> {
        let block = self.draft_len();
        if decoding.is_empty() || block == 0 {
            return None;
        }
        let load = self.step_load(decoding);
        // Hidden states that wait for the drafter take unplanned memory. The limit is the number of
        // prompt tokens of one step.
        let waiting: usize =
            self.pending.iter().flat_map(|context| &context.chunks).map(|&(_, rows)| rows).sum();
        if !self.planner.should_draft(load) && waiting <= MAX_PREFILL_TOKENS {
            return None;
        }
        self.pending = vec![concat_contexts(&self.pending)];
        let context = self.pending.first()?;
        let proposer = self.proposer.as_mut()?;
        let full_block = proposer.draft_len();
        let greedy = match self.options.draft_sampling {
            DraftSampling::Greedy => Some(inputs.decoding.to_greedy()),
            DraftSampling::Probabilistic => None,
        };
        let request = DraftRequest {
            context,
            slots: decoding,
            anchors: &inputs.anchors,
            uniforms: &inputs.draft,
            sampling: &inputs.decoding,
        };
        let drafts =
            match self.options.verify_rule.tree_budget() {
                Some(budget) => Drafts::Trees(proposer.propose_trees(&request, budget, block)),
                None => Drafts::Blocks(proposer.propose(&DraftRequest {
                    sampling: greedy.as_ref().unwrap_or(&inputs.decoding),
                    ..request
                })),
            };
        for (slot, rows) in self.pending.drain(..).flat_map(|context| context.chunks) {
            if let Some(sequence) = &mut self.slots[slot] {
                sequence.drafter_len += rows;
            }
        }
        let mut proposal = match drafts {
            Drafts::Blocks(proposal) => proposal,
            Drafts::Trees(trees) => {
                let lens = trees.iter().map(DraftTree::len).collect();
                return Some((Drafts::Trees(trees), lens));
            }
        };
        if block < full_block {
            proposal.tokens = proposal.tokens.narrow(1, 0, block as i64);
            proposal.probs = proposal.probs.map(|probs| probs.narrow(1, 0, block as i64));
            proposal.confidence = proposal.confidence.map(|c| c.narrow(1, 0, block as i64));
        }
        let lens = self.planner.verify_lengths(load, block, self.confidences(&proposal, block));
        Some((Drafts::Blocks(proposal), lens))
    }

    /// Calibrated confidences of the blocks if the policy reads them. The host needs them before
    /// the forward, because the target runs only the tokens that the policy selects. Without a
    /// confidence head every confidence is 1.
    fn confidences(&self, proposal: &Proposal, block: usize) -> Vec<Vec<f64>> {
        if !self.planner.policy().reads_confidence() {
            return vec![];
        }
        match &proposal.confidence {
            Some(logits) => {
                let values = to_host(&self.calibrate_confidences(logits).to_kind(Kind::Double));
                values.chunks(block).map(<[f64]>::to_vec).collect()
            }
            None => vec![vec![1.0; block]; proposal.tokens.size()[0] as usize],
        }
    }

    /// Number of sequences of a step and their mean context length.
    pub(super) fn step_load(&self, decoding: &[usize]) -> StepLoad {
        let target_len: usize = self.sequences(decoding).map(|sequence| sequence.target_len).sum();
        StepLoad { requests: decoding.len(), context: target_len / decoding.len().max(1) }
    }

    /// Maps confidence logits `[S, γ]` to probabilities.
    fn calibrate_confidences(&self, logits: &Tensor) -> Tensor {
        if self.temperatures.is_empty() {
            return logits.sigmoid();
        }
        let temperatures = self.device_state.temperatures.get_or_init(|| {
            let of = |k: usize| self.temperatures.get(k).map_or(1.0, |&t| t as f32);
            let temperatures: Vec<f32> = (0..logits.size()[1] as usize).map(of).collect();
            Tensor::from_slice(&temperatures).to_device(logits.device())
        });
        (logits / temperatures).sigmoid()
    }
}

/// Concatenates the hidden states that several steps saved for the drafter. The rows of each slot
/// become contiguous and stay in order.
fn concat_contexts(pending: &[Context]) -> Context {
    let pending: Vec<&Context> = pending.iter().filter(|context| !context.chunks.is_empty()).collect();
    let mut rows: Vec<(usize, i64)> = vec![];
    for &(slot, count) in pending.iter().flat_map(|context| &context.chunks) {
        rows.extend((rows.len()..rows.len() + count).map(|row| (slot, row as i64)));
    }
    rows.sort_by_key(|&(slot, _)| slot); // stable
    let of = |part: fn(&Context) -> &Tensor| match pending.as_slice() {
        [] => Tensor::new(),
        [one] => part(one).shallow_clone(),
        several => {
            let parts: Vec<&Tensor> = several.iter().map(|context| part(context)).collect();
            cat_row_runs(&Tensor::cat(&parts, 0), rows.iter().map(|&(_, row)| (row, 1)))
        }
    };
    let hidden = pending.first().is_some_and(|context| context.hidden.is_some());
    Context {
        captured_states: of(|context| &context.captured_states),
        hidden: hidden.then(|| of(|context| context.hidden.as_ref().unwrap_or(&context.captured_states))),
        tokens: of(|context| &context.tokens),
        next: of(|context| &context.next),
        chunks: match pending.as_slice() {
            [one] => one.chunks.clone(),
            _ => rows.chunk_by(|a, b| a.0 == b.0).map(|chunk| (chunk[0].0, chunk.len())).collect(),
        },
    }
}
