//! Random numbers of a sequence, sent to the device for many steps at once.

use deepspec_core::rng::{Purpose, Stream};
use deepspec_ops::Upload;
use tch::{Device, Tensor};

use crate::Sampling;

/// Steps of a sequence whose draws are sent at once.
const STEPS: usize = 256;

/// Draws of some steps of a sequence, and how it is sampled.
pub struct Uniforms {
    /// The first of the steps.
    first: u64,
    /// [`Sampling::numbers`], `[5]` float64.
    settings: Tensor,
    /// Those of the drafter, of acceptance and of the token behind, `[steps, γ + γ' + 1]` float64.
    lanes: Tensor,
}

/// How many draws of each purpose a step of a sequence takes.
#[derive(Clone, Copy)]
pub struct UniformCounts {
    /// Those of the drafter.
    pub draft: usize,
    /// Those that decide what is accepted.
    pub accept: usize,
}

impl UniformCounts {
    /// Draws of a step.
    pub fn all(self) -> usize {
        self.draft + self.accept + 1
    }

    /// Every draw is keyed by its sequence, step, purpose and lane.
    fn of(self, stream: &Stream, step: u64) -> impl Iterator<Item = f64> {
        let lanes = [(Purpose::Draft, self.draft), (Purpose::Accept, self.accept), (Purpose::Target, 1)];
        let draw = move |purpose, lane| stream.uniform(step, purpose, lane as u64);
        lanes.into_iter().flat_map(move |(purpose, lanes)| (0..lanes).map(move |lane| draw(purpose, lane)))
    }
}

/// Where the draws of a sequence come from.
pub struct UniformSource<'a> {
    /// Keyed by the sequence.
    pub stream: &'a Stream,
    /// How it is sampled.
    pub sampling: &'a Sampling,
    /// Steps that it may take.
    pub steps: usize,
}

impl UniformSource<'_> {
    /// The draws of a step, `[1, lanes]` float64, and the settings. Those of the steps behind it are sent with them, to `kept`.
    pub fn draws(
        &self,
        kept: &mut Option<Uniforms>,
        step: u64,
        lanes: UniformCounts,
        device: Device,
    ) -> (Tensor, Tensor) {
        let place = |draws: &Uniforms| {
            let at = step.checked_sub(draws.first)? as i64;
            let [steps, width] = [0, 1].map(|dim| draws.lanes.size()[dim]);
            let is_there = at < steps && width == lanes.all() as i64;
            is_there.then(|| (draws.lanes.narrow(0, at, 1), draws.settings.shallow_clone()))
        };
        if let Some(found) = kept.as_ref().and_then(place) {
            return found;
        }
        let steps = STEPS.min(self.steps);
        let mut upload = Upload::default();
        let mut table = Vec::with_capacity(steps * lanes.all());
        (step..step + steps as u64).for_each(|step| table.extend(lanes.of(self.stream, step)));
        let table = upload.push(table);
        let settings = upload.push(self.sampling.numbers());
        let sent = upload.send(device);
        let (lanes, settings) = (sent.of(table).view([steps as i64, lanes.all() as i64]), sent.of(settings));
        let found = (lanes.narrow(0, 0, 1), settings.shallow_clone());
        *kept = Some(Uniforms { first: step, lanes, settings });
        found
    }
}
