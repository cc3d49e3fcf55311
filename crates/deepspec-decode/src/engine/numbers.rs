//! The numbers of a step that are known before anything runs, sent to the device at once.

use deepspec_core::rng::Purpose;
use tch::{Kind, Tensor};

use super::Engine;
use super::sequence::Sequence;
use crate::{Proposer, SamplingBatch, Target, Upload};

/// Anchors, draws and settings of the slots that take part in a step.
pub struct Numbers {
    /// Last committed tokens of the decoding slots, `[S]` int64.
    pub anchors: Tensor,
    /// Decide the drafter's draws, `[S, γ]` float64.
    pub draft: Tensor,
    /// Decide what of the blocks is accepted, `[S, γ]` float64.
    pub accept: Tensor,
    /// Decide the tokens behind them, `[S]` float64.
    pub next: Tensor,
    /// Decide the prompts' first tokens, `[P]` float64.
    pub first: Tensor,
    /// How the decoding slots are sampled.
    pub decoding: SamplingBatch,
    /// How the prompts' first tokens are.
    pub prefilling: SamplingBatch,
}

impl<T: Target, P: Proposer> Engine<T, P> {
    /// Those of a step, in one transfer. Every draw is keyed by its sequence, step, purpose and lane.
    pub(super) fn numbers(&self, decoding: &[usize], prefilling: &[usize]) -> Numbers {
        let draws = |slots: &[usize], purpose: Purpose, lanes: usize| -> Vec<f64> {
            let lanes = |s: &Sequence| -> Vec<f64> {
                (0..lanes as u64).map(|lane| s.stream.uniform(s.step(), purpose, lane)).collect()
            };
            self.sequences(slots).flat_map(lanes).collect()
        };
        let settings =
            |slots: &[usize]| self.sequences(slots).map(|s| s.request.sampling).collect::<Vec<_>>();
        let proposer = self.proposer.as_ref().filter(|_| self.draft_len() > 0);
        let (full_block, block) = (proposer.map_or(0, Proposer::draft_len), self.draft_len());
        let (ours, theirs) = (settings(decoding), settings(prefilling));

        let mut upload = Upload::default();
        // Ids are far below 2⁵³.
        let anchors =
            upload.push(self.sequences(decoding).filter_map(|s| s.anchor).map(|anchor| anchor as f64));
        let draft = upload.push(draws(decoding, Purpose::Draft, full_block));
        let accept = upload.push(draws(decoding, Purpose::Accept, block));
        let next = upload.push(draws(decoding, Purpose::Target, 1));
        let first = upload.push(draws(prefilling, Purpose::Target, 1));
        let [decoded, prefilled] =
            [&ours, &theirs].map(|rows| upload.push(rows.iter().flat_map(|row| row.numbers())));
        let sent = upload.send(self.target.device());
        let lanes = |part, lanes: usize| sent.of(part).view([decoding.len() as i64, lanes as i64]);
        Numbers {
            anchors: sent.of(anchors).to_kind(Kind::Int64),
            draft: lanes(draft, full_block),
            accept: lanes(accept, block),
            next: sent.of(next),
            first: sent.of(first),
            decoding: SamplingBatch::with(ours, &sent.of(decoded)),
            prefilling: SamplingBatch::with(theirs, &sent.of(prefilled)),
        }
    }
}
