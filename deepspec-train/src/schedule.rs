//! Plans steps, epochs and the order of samples; pure arithmetic.

use deepspec_capture::ForwardLimits;
use deepspec_core::cli::UsageError;
use deepspec_core::recipe::TrainRecipe;
use deepspec_core::rng::{Purpose, Stream};
use deepspec_drafters::Recipe;

/// Inputs of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScheduleInputs {
    /// Number of processes.
    pub world_size: usize,
    /// Samples in the data set.
    pub dataset_size: usize,
    /// Samples per forward and process.
    pub local_batch_size: usize,
    /// Samples per optimiser step.
    pub global_batch_size: usize,
    /// Passes over the data, unless `max_train_steps` is given.
    pub num_train_epochs: usize,
    /// Optimiser steps.
    pub max_train_steps: Option<usize>,
}

/// Why sizes do not fit together.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SizeError {
    /// The batch cannot be split evenly.
    #[error(
        "train.global_batch_size {global} is not divisible by {world} processes × train.local_batch_size {local}"
    )]
    Indivisible {
        /// Global batch.
        global: usize,
        /// Processes.
        world: usize,
        /// Local batch.
        local: usize,
    },
    /// Fewer samples than one step needs.
    #[error(
        "the data has {samples} samples, fewer than one step of train.global_batch_size {global}; use a smaller batch or more data"
    )]
    TooFewSamples {
        /// Samples in the data set.
        samples: usize,
        /// Global batch.
        global: usize,
    },
}

/// The schedule of `recipe` for `samples` samples.
///
/// # Errors
/// A usage error if the sizes do not fit together.
pub fn from_recipe(recipe: &Recipe, samples: usize, processes: usize) -> anyhow::Result<Schedule> {
    let sizes = ScheduleInputs {
        world_size: processes,
        dataset_size: samples,
        // With a token limit, a forward may have any number of samples.
        local_batch_size: recipe.train.max_tokens_per_batch.map_or(recipe.train.local_batch_size, |_| 1),
        global_batch_size: recipe.train.global_batch_size,
        num_train_epochs: recipe.train.num_train_epochs,
        max_train_steps: recipe.train.max_train_steps,
    };
    Ok(Schedule::new(sizes).map_err(|error| UsageError(error.to_string()))?)
}

/// Numbers of steps, epochs and samples of a run. An incomplete last batch of an epoch is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedule {
    /// Samples of all processes per optimiser step.
    pub samples_per_step: usize,
    /// Forwards per process and optimiser step; an upper bound with a token limit.
    pub gradient_accumulation_steps: usize,
    /// Samples that one epoch uses.
    pub samples_per_epoch: usize,
    /// Samples of one epoch per process.
    pub per_rank_samples_per_epoch: usize,
    /// Forwards per process and epoch; an upper bound with a token limit.
    pub micro_batches_per_epoch: usize,
    /// Optimiser steps per epoch.
    pub steps_per_epoch: usize,
    /// Optimiser steps in total.
    pub max_train_steps: usize,
    /// Number of epochs, including an incomplete last one.
    pub num_train_epochs: usize,
}

impl Schedule {
    /// Computes the schedule.
    ///
    /// # Errors
    /// Fails if the sizes do not fit together.
    pub fn new(sizes: ScheduleInputs) -> Result<Self, SizeError> {
        let ScheduleInputs {
            world_size: world,
            dataset_size: samples,
            local_batch_size: local,
            global_batch_size: global,
            ..
        } = sizes;
        if global % (world * local) != 0 {
            return Err(SizeError::Indivisible { global, world, local });
        }
        if samples < global {
            return Err(SizeError::TooFewSamples { samples, global });
        }
        let steps_per_epoch = samples / global;
        let samples_per_epoch = steps_per_epoch * global;
        let per_rank = samples_per_epoch / world;
        let max_train_steps = sizes.max_train_steps.unwrap_or(steps_per_epoch * sizes.num_train_epochs);
        Ok(Self {
            samples_per_step: global,
            gradient_accumulation_steps: global / (world * local),
            samples_per_epoch,
            per_rank_samples_per_epoch: per_rank,
            micro_batches_per_epoch: per_rank / local,
            steps_per_epoch,
            max_train_steps,
            num_train_epochs: max_train_steps.div_ceil(steps_per_epoch),
        })
    }
}

/// Selects the samples of one process from all samples of an optimiser step.
pub fn samples_of_rank<T>(step: &[T], rank: usize, world_size: usize) -> impl Iterator<Item = &T> {
    step.iter().skip(rank).step_by(world_size)
}

/// Maximum numbers of sequences and tokens per forward pass.
pub fn forward_budget(train: &TrainRecipe) -> ForwardLimits {
    ForwardLimits {
        sequences: train.local_batch_size,
        tokens: train.max_tokens_per_batch.unwrap_or(usize::MAX),
    }
}

/// Number of samples of length `length` in a forward.
pub fn samples_per_forward(train: &TrainRecipe, length: usize) -> usize {
    let ForwardLimits { sequences, tokens } = forward_budget(train);
    (tokens / length.max(1)).clamp(1, sequences)
}

/// One occurrence of a sample in the order of training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleDraw {
    /// Index of the pass over the data.
    pub epoch: usize,
    /// Index of the sample in the data set.
    pub sample: usize,
}

/// The infinite order of samples. Resuming needs only a position in it.
pub struct SampleOrder<P> {
    samples_per_epoch: usize,
    permutation: P,
    cached: Option<(usize, Vec<usize>)>,
}

impl<P: Fn(usize) -> Vec<usize>> SampleOrder<P> {
    /// Epoch e visits the first `samples_per_epoch` entries of `permutation(e)`.
    pub fn new(samples_per_epoch: usize, permutation: P) -> Self {
        Self { samples_per_epoch, permutation, cached: None }
    }

    /// The sample at a position in the order of all processes. Process r of w reads positions r, r
    /// + w, …
    pub fn sample_at(&mut self, position: usize) -> SampleDraw {
        let (epoch, place) = (position / self.samples_per_epoch, position % self.samples_per_epoch);
        let permutation = match self.cached.take() {
            Some((cached, permutation)) if cached == epoch => permutation,
            _ => (self.permutation)(epoch),
        };
        let sample = permutation[place];
        self.cached = Some((epoch, permutation));
        SampleDraw { epoch, sample }
    }
}

/// A new shuffle for every epoch.
pub fn epoch_shuffle(seed: u64, dataset_size: usize) -> impl Fn(usize) -> Vec<usize> {
    move |epoch| Stream::new(seed, &format!("epoch-{epoch}")).permutation(dataset_size, Purpose::Shuffle)
}

/// The draws of a sample's anchors. They depend only on seed, epoch and sample id.
#[derive(Clone, Copy)]
pub struct AnchorDraws<'a> {
    /// Seed of the run.
    pub seed: u64,
    /// Epoch.
    pub epoch: usize,
    /// Id of the sample.
    pub id: &'a str,
}

impl AnchorDraws<'_> {
    /// Chooses at most `count` of the candidates, sorted. Samples of different numbers `draw` are independent.
    pub fn choose(self, candidates: &[usize], count: usize, draw: usize) -> Vec<usize> {
        let Self { seed, epoch, id } = self;
        let name = match draw {
            0 => format!("anchors-{epoch}-{id}"),
            draw => format!("draw-{draw}-of-anchors-{epoch}-{id}"),
        };
        let mut chosen = Stream::new(seed, &name).choose(candidates, count, Purpose::Anchor);
        chosen.sort_unstable();
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_of_anchors_are_repeatable_and_independent() {
        let candidates: Vec<usize> = (0..100).collect();
        let draws = |epoch| AnchorDraws { seed: 1, epoch, id: "a" };
        let first = draws(0).choose(&candidates, 50, 0);
        assert!(first.is_sorted() && first.len() == 50);
        assert_eq!(first, draws(0).choose(&candidates, 50, 0));
        let others = [
            draws(0).choose(&candidates, 50, 1),
            draws(0).choose(&candidates, 50, 2),
            draws(1).choose(&candidates, 50, 0),
        ];
        for (at, other) in others.iter().enumerate() {
            // About half of them are also among those of an independent draw.
            let shared = other.iter().filter(|anchor| first.contains(anchor)).count();
            assert!((15..36).contains(&shared), "draw {at}: {shared}");
        }
    }

    #[test]
    fn forwards_are_bounded_by_samples_and_by_tokens() {
        let samples = |sequences, tokens, length| {
            let train = TrainRecipe {
                local_batch_size: sequences,
                max_tokens_per_batch: tokens,
                ..TrainRecipe::default()
            };
            samples_per_forward(&train, length)
        };
        assert_eq!([samples(4, Some(100), 30), samples(4, Some(10), 30), samples(2, None, 30)], [3, 1, 2]);
    }
}
