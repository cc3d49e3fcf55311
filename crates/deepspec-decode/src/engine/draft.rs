//! What the drafter proposes, and how much of it is verified.

use deepspec_core::rng::Purpose;
use tch::{Kind, Tensor};

use super::{Engine, to_host};
use crate::{DraftRequest, Proposal, Proposer, Target};

impl<T: Target, P: Proposer> Engine<T, P> {
    /// Blocks for all decoding slots, and how much of each is verified; None without a drafter or anything to draft.
    pub(super) fn draft(&mut self, decoding: &[usize]) -> Option<(Proposal, Vec<usize>)> {
        let block = self.block_size();
        if decoding.is_empty() || block == 0 {
            return None;
        }
        let (anchors, sampling) = (self.anchors(decoding), self.sampling(decoding));
        let full_block = self.proposer.as_ref()?.block_size();
        let uniforms = self.uniforms(decoding, Purpose::Draft, full_block);
        let proposer = self.proposer.as_mut()?;
        let mut proposal = proposer.propose(&DraftRequest {
            context: &self.context,
            slots: decoding,
            anchors: &anchors,
            uniforms: &uniforms,
            sampling: &sampling,
        });
        self.context.chunks.clear();
        if block < full_block {
            proposal.tokens = proposal.tokens.narrow(1, 0, block as i64);
            proposal.probs = proposal.probs.narrow(1, 0, block as i64);
            proposal.confidence = proposal.confidence.map(|c| c.narrow(1, 0, block as i64));
        }
        let ends_at_stop_tokens = proposer.ends_at_stop_tokens();
        let mut lens = match &proposal.confidence {
            Some(logits) if self.options.confidence_threshold > 0.0 => {
                kept_lengths(&self.calibrated(logits), self.options.confidence_threshold)
            }
            _ => vec![block; decoding.len()],
        };
        if ends_at_stop_tokens {
            self.cut_at_stop_tokens(decoding, &proposal.tokens, &mut lens);
        }
        Some((proposal, lens))
    }

    /// Confidence logits `[S, γ]` as probabilities.
    fn calibrated(&self, logits: &Tensor) -> Tensor {
        if self.temperatures.is_empty() {
            return logits.sigmoid();
        }
        let of = |k: usize| self.temperatures.get(k).map_or(1.0, |&t| t as f32);
        let temperatures: Vec<f32> = (0..logits.size()[1] as usize).map(of).collect();
        (logits / Tensor::from_slice(&temperatures).to_device(logits.device())).sigmoid()
    }

    /// Shortens blocks `[S, γ]` to end with the first stop token in them.
    fn cut_at_stop_tokens(&self, decoding: &[usize], tokens: &Tensor, lens: &mut [usize]) {
        if self.sequences(decoding).all(|sequence| sequence.request.stop_ids.is_empty()) {
            return;
        }
        let drafted = to_host(&tokens.to_kind(Kind::Double).reshape([-1]));
        let blocks = drafted.chunks(tokens.size()[1] as usize);
        for ((sequence, block), len) in self.sequences(decoding).zip(blocks).zip(lens) {
            let stops = |token: &f64| sequence.request.stop_ids.contains(&(*token as i64));
            *len = block[..*len].iter().position(stops).map_or(*len, |at| at + 1);
        }
    }
}

/// How many tokens of each block stand before the first whose confidence is below the threshold; `confidence [S, γ]`.
pub fn kept_lengths(confidence: &Tensor, threshold: f64) -> Vec<usize> {
    let keeps = confidence.to_kind(Kind::Double).ge(threshold).to_kind(Kind::Int64);
    to_host(&keeps.cumprod(1, Kind::Int64).sum_dim_intlist(1, false, Kind::Double))
        .iter()
        .map(|&n| n as usize)
        .collect()
}
