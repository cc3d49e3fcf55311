//! Inputs of a step that are known before any forward. Inputs that the last step computed are on
//! the device already.

use std::cell::OnceCell;

use deepspec_core::rng::Purpose;
use deepspec_ops::{DeviceArange, Upload, runs};
use tch::{Device, Kind, Tensor};

use super::Engine;
use super::uniforms::{UniformCounts, UniformSource};
use crate::{Proposer, Sampling, SamplingBatch, Target};

/// Anchors, random numbers and sampling settings of the slots that take part in a step.
pub struct StepInputs {
    /// Last committed tokens of the decoding slots, `[S]` int64.
    pub anchors: Tensor,
    /// Uniforms for sampling the drafts, `[S, γ]` float64.
    pub draft: Tensor,
    /// Uniforms for accepting the drafts, `[S, γ]` float64.
    pub accept: Tensor,
    /// Uniforms for the token after the accepted ones, `[S]` float64.
    pub next: Tensor,
    /// Tokens of all prompts, concatenated, int64.
    pub prompts: Tensor,
    /// Uniforms for the prompts' first tokens, `[P]` float64.
    pub first: Tensor,
    /// Sampling settings of the decoding slots.
    pub decoding: SamplingBatch,
    /// Sampling settings of the prompts' first tokens.
    pub prefilling: SamplingBatch,
}

/// Tensors of earlier steps that stay on the device.
pub struct DeviceState {
    /// Slots of the last step in the order of its chunks, and the token drawn after each chunk,
    /// `[S + P]` int64.
    pub drawn: Option<(Vec<usize>, Tensor)>,
    /// Constant uniforms for greedy sampling, `[S, lanes]` float64.
    halves: Option<Tensor>,
    /// Divisors of the confidence logits, `[γ]` float32, created at first use.
    pub temperatures: OnceCell<Tensor>,
    /// An arange on the device, from which index tensors are cut.
    pub ruler: DeviceArange,
}

impl DeviceState {
    /// An empty state.
    pub fn new(device: Device) -> Self {
        Self { drawn: None, halves: None, temperatures: OnceCell::new(), ruler: DeviceArange::new(device) }
    }
}

impl<T: Target, P: Proposer> Engine<T, P> {
    /// The inputs of one step.
    pub(super) fn numbers(&mut self, decoding: &[usize], prefilling: &[usize]) -> StepInputs {
        let settings =
            |slots: &[usize]| self.sequences(slots).map(|s| s.request.sampling).collect::<Vec<_>>();
        let (ours, theirs) = (settings(decoding), settings(prefilling));
        let proposer = self.proposer.as_ref().filter(|_| self.draft_len() > 0);
        let lanes =
            UniformCounts { draft: proposer.map_or(0, Proposer::draft_len), accept: self.draft_len() };
        let (draws, ours_in_numbers) = if ours.iter().all(Sampling::is_greedy) {
            (self.halves(decoding.len(), lanes), Tensor::zeros([0], (Kind::Double, self.target.device())))
        } else {
            self.draws(decoding, lanes)
        };
        let [draft, accept] = [(0, lanes.draft), (lanes.draft, lanes.accept)]
            .map(|(first, count)| draws.narrow(1, first as i64, count as i64));

        let mut upload = Upload::default();
        let first = self.sequences(prefilling).map(|s| s.stream.uniform(s.step(), Purpose::Target, 0));
        let first = upload.push(first.collect::<Vec<_>>());
        let prefilled = upload.push(theirs.iter().flat_map(Sampling::numbers));
        let sent = upload.send(self.target.device());
        let mut prompts = Upload::default();
        let tokens = self.sequences(prefilling).flat_map(|sequence| &sequence.request.prompt);
        let prompt_tokens = prompts.push(tokens.copied());
        StepInputs {
            anchors: self.anchors(decoding),
            next: draws.select(1, (lanes.all() - 1) as i64),
            draft,
            accept,
            prompts: prompts.send(self.target.device()).of(prompt_tokens),
            first: sent.of(first),
            decoding: SamplingBatch::with(ours, &ours_in_numbers),
            prefilling: SamplingBatch::with(theirs, &sent.of(prefilled)),
        }
    }

    /// Last committed tokens of `slots`, `[S]` int64, from the tokens that the last step drew.
    fn anchors(&self, slots: &[usize]) -> Tensor {
        let drawn = self.resident.drawn.as_ref().and_then(|(all, drawn)| {
            let place = |slot: &usize| all.iter().position(|other| other == slot).map(|at| (at as i64, 1));
            Some(runs(drawn, slots.iter().map(place).collect::<Option<Vec<_>>>()?))
        });
        debug_assert!(drawn.is_some() || slots.is_empty(), "who decodes took part in the last step");
        drawn.unwrap_or_else(|| {
            let anchors: Vec<i64> = self.sequences(slots).filter_map(|s| s.anchor).collect();
            Tensor::from_slice(&anchors).to_device(self.target.device())
        })
    }

    /// Constant uniforms of 0.5. Greedy sampling gives the same token for any uniform.
    fn halves(&mut self, slots: usize, lanes: UniformCounts) -> Tensor {
        let size = [slots as i64, lanes.all() as i64];
        let known = self.resident.halves.take().filter(|known| known.size() == size);
        let halves = known.unwrap_or_else(|| Tensor::full(size, 0.5, (Kind::Double, self.target.device())));
        self.resident.halves = Some(halves.shallow_clone());
        halves
    }

    /// Uniforms `[S, lanes]` and sampling settings `[S·5]`, float64.
    fn draws(&mut self, slots: &[usize], lanes: UniformCounts) -> (Tensor, Tensor) {
        let device = self.target.device();
        let sequences = slots.iter().filter_map(|&slot| {
            let sequence = self.slots.get_mut(slot)?.as_mut()?;
            let (step, steps) = (sequence.step(), sequence.request.max_new_tokens);
            let source =
                UniformSource { stream: &sequence.stream, sampling: &sequence.request.sampling, steps };
            Some(source.draws(&mut sequence.draws, step, lanes, device))
        });
        let (draws, settings): (Vec<Tensor>, Vec<Tensor>) = sequences.unzip();
        match (draws.as_slice(), settings.as_slice()) {
            ([draws], [settings]) => (draws.shallow_clone(), settings.shallow_clone()),
            _ => (Tensor::cat(&draws, 0), Tensor::cat(&settings, 0)),
        }
    }
}
