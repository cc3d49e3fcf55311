//! Inputs of a step that are known before any forward. Inputs that the last step computed are on
//! the device already.

use std::cell::OnceCell;

use deepspec_core::rng::Purpose;
use deepspec_ops::{DeviceArange, Upload, cat_row_runs};
use tch::{Device, Kind, Tensor};

use super::Engine;
use super::uniforms::{UniformCounts, UniformSource};
use crate::{Proposer, Sampling, SamplingBatch, Target};

/// Anchors, random numbers and sampling settings of all slots of a step.
pub struct StepInputs {
    /// Last committed tokens of the decoding slots, `[S]` int64.
    pub anchors: Tensor,
    /// Uniforms for sampling the drafts, `[S, γ]` float64.
    pub draft: Tensor,
    /// Uniforms for accepting the drafts, `[S, γ]` float64.
    pub accept: Tensor,
    /// Uniforms for the token after the accepted tokens, `[S]` float64.
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
    pub last_tokens: Option<(Vec<usize>, Tensor)>,
    /// Constant uniforms for greedy sampling, `[S, columns]` float64.
    constant_uniforms: Option<Tensor>,
    /// Divisors of the confidence logits, `[γ]` float32, created at first use.
    pub temperatures: OnceCell<Tensor>,
    /// An arange on the device, from which index tensors are cut.
    pub arange: DeviceArange,
}

impl DeviceState {
    /// An empty state.
    pub fn new(device: Device) -> Self {
        Self {
            last_tokens: None,
            constant_uniforms: None,
            temperatures: OnceCell::new(),
            arange: DeviceArange::new(device),
        }
    }
}

impl<T: Target, P: Proposer> Engine<T, P> {
    /// Builds the inputs of one step.
    pub(super) fn step_inputs(&mut self, decoding: &[usize], prefilling: &[usize]) -> StepInputs {
        let settings =
            |slots: &[usize]| self.sequences(slots).map(|s| s.request.sampling).collect::<Vec<_>>();
        let (ours, theirs) = (settings(decoding), settings(prefilling));
        let proposer = self.proposer.as_ref().filter(|_| self.draft_len() > 0);
        let counts =
            UniformCounts { draft: proposer.map_or(0, Proposer::draft_len), accept: self.draft_len() };
        let (draws, our_parameters) = if ours.iter().all(Sampling::is_greedy) {
            (
                self.constant_uniforms(decoding.len(), counts),
                Tensor::zeros([0], (Kind::Double, self.target.device())),
            )
        } else {
            self.uniforms_and_settings(decoding, counts)
        };
        let [draft, accept] = [(0, counts.draft), (counts.draft, counts.accept)]
            .map(|(first, count)| draws.narrow(1, first as i64, count as i64));

        let mut upload = Upload::default();
        let first = self.sequences(prefilling).map(|s| s.stream.uniform(s.step_index(), Purpose::Target, 0));
        let first = upload.push(first.collect::<Vec<_>>());
        let prefilled = upload.push(theirs.iter().flat_map(Sampling::parameters));
        let sent = upload.send(self.target.device());
        let mut prompts = Upload::default();
        let tokens = self.sequences(prefilling).flat_map(|sequence| &sequence.request.prompt);
        let prompt_tokens = prompts.push(tokens.copied());
        StepInputs {
            anchors: self.anchor_tokens(decoding),
            next: draws.select(1, (counts.total() - 1) as i64),
            draft,
            accept,
            prompts: prompts.send(self.target.device()).slice(prompt_tokens),
            first: sent.slice(first),
            decoding: SamplingBatch::with_parameters(ours, &our_parameters),
            prefilling: SamplingBatch::with_parameters(theirs, &sent.slice(prefilled)),
        }
    }

    /// Last committed tokens of `slots`, `[S]` int64, from the tokens that the last step drew.
    fn anchor_tokens(&self, slots: &[usize]) -> Tensor {
        let drawn = self.device_state.last_tokens.as_ref().and_then(|(all, drawn)| {
            let place = |slot: &usize| all.iter().position(|other| other == slot).map(|at| (at as i64, 1));
            Some(cat_row_runs(drawn, slots.iter().map(place).collect::<Option<Vec<_>>>()?))
        });
        debug_assert!(drawn.is_some() || slots.is_empty(), "who decodes took part in the last step");
        drawn.unwrap_or_else(|| {
            let anchors: Vec<i64> = self.sequences(slots).filter_map(|s| s.anchor).collect();
            Tensor::from_slice(&anchors).to_device(self.target.device())
        })
    }

    /// Constant uniforms of 0.5. Greedy sampling gives the same token for any uniform.
    fn constant_uniforms(&mut self, slots: usize, counts: UniformCounts) -> Tensor {
        let size = [slots as i64, counts.total() as i64];
        let known = self.device_state.constant_uniforms.take().filter(|known| known.size() == size);
        let constant_uniforms =
            known.unwrap_or_else(|| Tensor::full(size, 0.5, (Kind::Double, self.target.device())));
        self.device_state.constant_uniforms = Some(constant_uniforms.shallow_clone());
        constant_uniforms
    }

    /// Uniforms `[S, columns]` and sampling settings `[S·5]`, float64.
    fn uniforms_and_settings(&mut self, slots: &[usize], counts: UniformCounts) -> (Tensor, Tensor) {
        let device = self.target.device();
        let sequences = slots.iter().filter_map(|&slot| {
            let sequence = self.slots.get_mut(slot)?.as_mut()?;
            let (step, steps) = (sequence.step_index(), sequence.request.max_new_tokens);
            let source =
                UniformSource { stream: &sequence.stream, sampling: &sequence.request.sampling, steps };
            Some(source.step_uniforms(&mut sequence.uniforms, step, counts, device))
        });
        let (draws, settings): (Vec<Tensor>, Vec<Tensor>) = sequences.unzip();
        match (draws.as_slice(), settings.as_slice()) {
            ([draws], [settings]) => (draws.shallow_clone(), settings.shallow_clone()),
            _ => (Tensor::cat(&draws, 0), Tensor::cat(&settings, 0)),
        }
    }
}
