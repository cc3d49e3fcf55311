//! Uniform random numbers of a sequence, copied to the device for many steps at once.

use deepspec_core::rng::{Purpose, Stream};
use deepspec_ops::Upload;
use tch::{Device, Tensor};

use crate::Sampling;

/// Number of steps whose random numbers are copied at once.
const STEPS_PER_UPLOAD: usize = 256;

/// Random numbers of some steps of a sequence, and its sampling settings.
pub struct UniformTable {
    /// First step of the table.
    first: u64,
    /// [`Sampling::parameters`], `[5]` float64.
    settings: Tensor,
    /// Uniforms for drafting, acceptance and the next token, `[steps, γ + γ' + 1]` float64.
    columns: Tensor,
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
    pub fn total(self) -> usize {
        self.draft + self.accept + 1
    }

    /// Uniforms of one step. Each is keyed by sequence, step, purpose and column.
    fn generate(self, stream: &Stream, step: u64) -> impl Iterator<Item = f64> {
        let columns = [(Purpose::Draft, self.draft), (Purpose::Accept, self.accept), (Purpose::Target, 1)];
        let draw = move |purpose, column| stream.uniform(step, purpose, column as u64);
        columns
            .into_iter()
            .flat_map(move |(purpose, columns)| (0..columns).map(move |column| draw(purpose, column)))
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
    /// The uniforms of a step, `[1, columns]` float64, and the sampling settings. `cache` caches the
    /// uniforms of the following steps, which are copied in the same transfer.
    pub fn step_uniforms(
        &self,
        cache: &mut Option<UniformTable>,
        step: u64,
        counts: UniformCounts,
        device: Device,
    ) -> (Tensor, Tensor) {
        let place = |cached: &UniformTable| {
            let at = step.checked_sub(cached.first)? as i64;
            let [steps, width] = [0, 1].map(|dim| cached.columns.size()[dim]);
            let is_there = at < steps && width == counts.total() as i64;
            is_there.then(|| (cached.columns.narrow(0, at, 1), cached.settings.shallow_clone()))
        };
        if let Some(found) = cache.as_ref().and_then(place) {
            return found;
        }
        let steps = STEPS_PER_UPLOAD.min(self.steps);
        let mut upload = Upload::default();
        let mut table = Vec::with_capacity(steps * counts.total());
        (step..step + steps as u64).for_each(|step| table.extend(counts.generate(self.stream, step)));
        let table = upload.push(table);
        let settings = upload.push(self.sampling.parameters());
        let sent = upload.send(device);
        let (columns, settings) =
            (sent.slice(table).view([steps as i64, counts.total() as i64]), sent.slice(settings));
        let found = (columns.narrow(0, 0, 1), settings.shallow_clone());
        *cache = Some(UniformTable { first: step, columns, settings });
        found
    }
}
