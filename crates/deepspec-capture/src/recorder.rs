//! The cache that the first epoch writes.

use std::path::PathBuf;
use std::sync::Arc;

use crate::cache::{Encoding, Plan, PlannedSample};
use crate::samples::Samples;
use crate::{StatesError, TargetSpec};

/// Bytes of hidden states per shard of a cache that training writes. A resumed first epoch
/// recomputes at most one shard.
const SHARD_BYTES: u64 = 256 << 20;

/// A cache that the first epoch writes.
pub(crate) struct CacheRecorder {
    pub dir: PathBuf,
    /// The samples in the order of the first epoch, so that shards are filled one after another.
    pub plan: Plan,
    /// The index of each sample in the plan.
    pub places: Arc<Vec<usize>>,
}

impl CacheRecorder {
    /// Plans a cache in `dir`; `order` is the order in which the first epoch visits the samples.
    pub fn new(
        dir: PathBuf,
        samples: &Samples,
        order: Vec<usize>,
        source: &TargetSpec,
    ) -> Result<Self, StatesError> {
        let mut places = vec![0; samples.len()];
        for (place, &sample) in order.iter().enumerate() {
            places[sample] = place;
        }
        let samples = order.into_iter().map(|index| samples.planned_sample(index)).collect();
        let plan = Plan::new(samples, source.layout(source.final_states, Encoding::Bf16), SHARD_BYTES)?;
        Ok(Self { dir, plan, places: Arc::new(places) })
    }

    /// Sample `index` of the dataset.
    pub fn sample(&self, index: usize) -> &PlannedSample {
        &self.plan.samples()[self.places[index]]
    }
}
