//! Uniform random numbers of a sequence, copied to the device for many steps at once.

use deepspec_core::rng::{Purpose, Stream};
use deepspec_ops::Upload;
use tch::{Device, Tensor};

use crate::Sampling;

/// Number of steps whose random numbers are copied at once.
const STEPS: usize = 256;

/// Random numbers of some steps of a sequence, and its sampling settings.
pub struct Uniforms {
    /// First step of the table.
    first: u64,
    /// [`Sampling::numbers`], `[5]` float64.
    settings: Tensor,
    /// Uniforms for drafting, acceptance and the next token, `[steps, γ + γ' + 1]` float64.
    lanes: Tensor,
}

/// Number of uniforms per purpose that a step of a sequence uses.
#[derive(Clone, Copy)]
pub struct UniformCounts {
    /// Uniforms for drafting.
    pub draft: usize,
    /// Uniforms for acceptance.
    pub accept: usize,
}

impl UniformCounts {
    /// Uniforms of one step, including one for the next token.
    pub fn all(self) -> usize {
        self.draft + self.accept + 1
    }

    /// Uniforms of one step. Each is keyed by sequence, step, purpose and lane.
    fn of(self, stream: &Stream, step: u64) -> impl Iterator<Item = f64> {
        let lanes = [(Purpose::Draft, self.draft), (Purpose::Accept, self.accept), (Purpose::Target, 1)];
        let draw = move |purpose, lane| stream.uniform(step, purpose, lane as u64);
        lanes.into_iter().flat_map(move |(purpose, lanes)| (0..lanes).map(move |lane| draw(purpose, lane)))
    }
}

/// Source of a sequence's random numbers.
pub struct UniformSource<'a> {
    /// Random stream of the sequence.
    pub stream: &'a Stream,
    /// Sampling settings of the sequence.
    pub sampling: &'a Sampling,
    /// Maximum number of its steps.
    pub steps: usize,
}

impl UniformSource<'_> {
    /// The uniforms of a step, `[1, lanes]` float64, and the sampling settings. `kept` caches the
    /// uniforms of the following steps, which are copied in the same transfer.
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
