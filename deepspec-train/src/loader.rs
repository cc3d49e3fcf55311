//! Prepares samples with their hidden states ahead of the trainer. One thread reads or computes the
//! states; with a GPU, a second thread copies them there.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Scope;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use deepspec_capture::cache::loss_mask;
use deepspec_capture::{
    Dataset, ForwardLimits, SampleMeta, StateSource, StatesError, reader_threads, split_into_batches,
};
use deepspec_core::cli;
use deepspec_core::recipe::{LossNormalization, StatesStorage};
use deepspec_drafters::Recipe;
use deepspec_drafters::{DrafterPlan, LossDenominator, TrainSample};
use deepspec_ops::{CudaEvent, CudaStream};
use tch::{Device, Tensor};

use crate::schedule::{AnchorDraws, SampleDraw, SampleOrder, Schedule, epoch_shuffle, samples_of_rank};
use crate::staging::{self, HostToDeviceCopier, MICRO_BATCHES_WAITING};

/// Micro-batches queued for the trainer.
const PREFETCH_MICRO_BATCHES: usize = 4;
/// Most micro-batches in memory: the queue, one being filled, and one in training.
pub(crate) const MAX_MICRO_BATCHES: usize = PREFETCH_MICRO_BATCHES + 2;

/// The samples of one forward and the denominator of their loss.
pub struct MicroBatch {
    /// The samples, including those without anchors.
    pub samples: Vec<TrainSample>,
    /// Denominator of their loss.
    pub normaliser: LossDenominator,
    /// Number of tokens in all samples.
    pub tokens: usize,
    /// Whether this is the last micro-batch of its optimiser step.
    pub ends_step: bool,
    /// Samples whose hidden states were not checked for NaN and infinity yet: the id, and a bool
    /// tensor on the target's device.
    pub finite_flags: Vec<(String, Tensor)>,
    /// Event after which the tensors on the GPU are complete; None on the CPU.
    ready: Option<CudaEvent>,
}

/// Settings that decide which samples, anchors and denominators the loader returns.
#[derive(Clone, Copy)]
pub struct LoaderOptions<'a> {
    /// Number of steps and samples.
    pub schedule: Schedule,
    /// Seed of the sample order and of the anchors.
    pub seed: u64,
    /// The drafter, which chooses the anchors and loss weights of a sample.
    pub drafter_plan: &'a dyn DrafterPlan,
    /// Most sequences and tokens of one forward.
    pub budget: ForwardLimits,
    /// Whether the denominator covers the global batch or one micro-batch.
    pub normalization: LossNormalization,
    /// Rank of this process.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// Device of the hidden states: the target's device if the target runs beside the trainer, else
    /// the CPU.
    pub states_device: Device,
    /// Device of the drafter.
    pub device: Device,
}

/// Returns micro-batches in the order of the schedule.
pub struct Loader {
    ready: Receiver<anyhow::Result<MicroBatch>>,
    waited: Duration,
}

impl Loader {
    /// Starts the threads at optimiser step `step`. The end of the scope waits for them.
    pub fn start<'scope, 'd: 'scope>(
        scope: &'scope Scope<'scope, '_>,
        dataset: &'d Dataset,
        states: StateSource<'d>,
        options: LoaderOptions<'d>,
        step: usize,
    ) -> Self {
        let (sender, mut ready) = sync_channel(PREFETCH_MICRO_BATCHES);
        // The target's stream must wait until the target's weights are loaded.
        let loaded = CudaEvent::record(options.states_device);
        scope.spawn(move || {
            // The target runs on its own stream, in parallel with the trainer.
            let _on = CudaStream::on_device(options.states_device).map(CudaStream::enter);
            if let Some(loaded) = loaded {
                loaded.make_stream_wait(options.states_device);
            }
            let mut work = LoaderThread { dataset, states, options, sender };
            if let Err(LoaderStop::Failed(error)) = work.run(step) {
                // If the trainer has stopped early, the receiver is gone and the error is dropped.
                let _ = work.sender.send(Err(error));
            }
        });
        if let Some(staging) = HostToDeviceCopier::for_device(options.device) {
            let (sender, staged) = sync_channel(MICRO_BATCHES_WAITING);
            let loaded = std::mem::replace(&mut ready, staged);
            scope.spawn(move || {
                for batch in loaded {
                    if sender.send(batch.and_then(|batch| copy_to_gpu(&staging, batch))).is_err() {
                        return;
                    }
                }
            });
        }
        Self { ready, waited: Duration::ZERO }
    }

    /// Returns the next micro-batch.
    ///
    /// # Errors
    /// Fails if the cache is damaged, the target's hidden states are not finite, or the schedule
    /// has ended.
    pub fn next_batch(&mut self) -> anyhow::Result<MicroBatch> {
        let asked = Instant::now();
        let batch = self.ready.recv().context("the loader stopped before the schedule ended")?;
        self.waited += asked.elapsed();
        let batch = batch?;
        if let Some(ready) = &batch.ready {
            staging::wait_for_states(
                ready,
                &batch.samples,
                batch.finite_flags.iter().map(|(_, finite)| finite),
            );
        }
        Ok(batch)
    }

    /// Returns the time spent waiting for data since the last call.
    pub fn take_wait_time(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }

    /// Waits for the work that the state source does after the last batch.
    ///
    /// # Errors
    /// Fails if that work failed.
    pub fn finish(self) -> anyhow::Result<()> {
        self.ready.into_iter().try_for_each(|rest| rest.map(drop))
    }
}

/// Starts the copy of the micro-batch's hidden states to the GPU.
fn copy_to_gpu(staging: &HostToDeviceCopier, mut batch: MicroBatch) -> anyhow::Result<MicroBatch> {
    let is_memory = |words: &str| words.contains("out of memory") || words.contains("page-locked memory");
    let ready = cli::catch_panic_if(is_memory, || staging.start_copy(&mut batch.samples)).map_err(|words| {
        anyhow!("bringing states to the GPU: {words}; fewer or shorter samples per forward take less (train.local_batch_size, data.max_length)")
    })?;
    batch.ready = ready.or(batch.ready.take());
    Ok(batch)
}

/// Why the thread ends before the schedule does.
enum LoaderStop {
    /// The trainer has dropped the receiver.
    HungUp,
    Failed(anyhow::Error),
}

impl From<StatesError> for LoaderStop {
    fn from(error: StatesError) -> Self {
        Self::Failed(error.into())
    }
}

/// State of the loader thread.
struct LoaderThread<'d> {
    dataset: &'d Dataset,
    states: StateSource<'d>,
    options: LoaderOptions<'d>,
    sender: SyncSender<anyhow::Result<MicroBatch>>,
}

impl LoaderThread<'_> {
    fn run(&mut self, first: usize) -> Result<(), LoaderStop> {
        let Schedule { samples_per_epoch, max_train_steps, .. } = self.options.schedule;
        let mut order =
            SampleOrder::new(samples_per_epoch, epoch_shuffle(self.options.seed, self.dataset.len()));
        for step in first..max_train_steps {
            self.load_step(step, &mut order)?;
        }
        Ok(self.states.finish(max_train_steps)?)
    }

    fn load_step<P: Fn(usize) -> Vec<usize>>(
        &mut self,
        step: usize,
        order: &mut SampleOrder<P>,
    ) -> Result<(), LoaderStop> {
        let options = self.options;
        let micro_batches = options.schedule.gradient_accumulation_steps;
        // Samples of one micro-batch on all ranks together.
        let together = options.world_size * options.budget.sequences;
        let batch = options.schedule.samples_per_step;
        // Plans the samples of all ranks, because every rank needs the denominators of the whole
        // step.
        let planned: Vec<PlannedSample> = (step * batch..(step + 1) * batch)
            .map(|position| order.sample_at(position))
            .map(|draw| plan_sample(&self.dataset.meta(draw.sample), options, draw))
            .collect();
        let own: Vec<&PlannedSample> = samples_of_rank(&planned, options.rank, options.world_size).collect();
        let samples: Vec<usize> = own.iter().map(|planned| planned.sample).collect();
        self.states.begin_step(step, &samples)?;
        let length = |planned: &&PlannedSample| self.dataset.meta(planned.sample).input_ids.len();
        let forwards = split_into_batches(own.iter().map(length), options.budget);
        let weight = |planned: &[PlannedSample]| planned.iter().map(|p| p.weight).sum::<f64>();
        let total = weight(&planned);
        let last = forwards.len().saturating_sub(1);
        for (number, forward) in forwards.into_iter().enumerate() {
            let normaliser = match options.normalization {
                LossNormalization::Global => total,
                // The loss is the mean over micro-batches. The loss of each is divided by the loss
                // weights of its samples on all ranks. This mode has no token limit.
                LossNormalization::MicroBatch => {
                    weight(&planned[number * together..][..together]) * micro_batches as f64
                }
            };
            let mut finite_flags = vec![];
            let samples = own[forward]
                .iter()
                .map(|planned| self.load_sample(planned, &mut finite_flags))
                .collect::<Result<Vec<_>, StatesError>>()?;
            let tokens = samples.iter().map(|sample| sample.input_ids.len()).sum();
            let (normaliser, ends_step) = (LossDenominator(normaliser), number == last);
            let ready = CudaEvent::record(options.states_device);
            let batch = MicroBatch { samples, normaliser, tokens, ends_step, finite_flags, ready };
            self.sender.send(Ok(batch)).map_err(|_| LoaderStop::HungUp)?;
        }
        Ok(())
    }

    fn load_sample(
        &mut self,
        planned: &PlannedSample,
        finite_flags: &mut Vec<(String, Tensor)>,
    ) -> Result<TrainSample, StatesError> {
        let facts = self.dataset.meta(planned.sample);
        let states = self.states.next_states()?;
        finite_flags.extend(states.unseen.map(|finite| (facts.id.to_string(), finite)));
        Ok(TrainSample {
            loss_mask: sample_loss_mask(&facts),
            input_ids: facts.input_ids.iter().map(|&id| i64::from(id)).collect(),
            taps: states.taps,
            last: states.last,
            last_positions: states.last_positions,
            anchors: planned.anchors.clone(),
        })
    }
}

/// A sample of a step before its hidden states are read.
struct PlannedSample {
    sample: usize,
    anchors: Vec<usize>,
    weight: f64,
}

/// Anchors and loss weight of a sample. They depend on its loss mask only, not on its hidden
/// states.
fn plan_sample(facts: &SampleMeta<'_>, options: LoaderOptions, draw: SampleDraw) -> PlannedSample {
    let mask = sample_loss_mask(facts);
    let draws = AnchorDraws { seed: options.seed, epoch: draw.epoch, id: &facts.id };
    let mut choose = |candidates: &[usize], count, draw| draws.choose(candidates, count, draw);
    let anchors = options.drafter_plan.choose_anchors(&mask, &mut choose);
    let weight = options.drafter_plan.loss_denominator_part(&mask, &anchors);
    PlannedSample { sample: draw.sample, anchors, weight }
}

/// Loss mask of a sample, one flag per token. A sample's length fits 32 bits, because longer
/// samples are neither planned nor read.
pub(crate) fn sample_loss_mask(facts: &SampleMeta<'_>) -> Vec<bool> {
    loss_mask(facts.input_ids.len() as u32, &facts.spans)
}

/// Most samples that cache readers load ahead of the micro-batch that is needed next.
pub fn max_samples_ahead(recipe: &Recipe) -> usize {
    let train = &recipe.train;
    let ends_with_it =
        train.max_tokens_per_batch.is_none() && train.local_batch_size.is_multiple_of(reader_threads());
    if recipe.data.states.storage == StatesStorage::Online || ends_with_it { 0 } else { reader_threads() - 1 }
}
