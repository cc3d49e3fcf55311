//! Samples from the cache, read ahead of the trainer by a thread of their own.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use deepspec_cache::{Reader, Sample, loss_mask};
use deepspec_core::recipe::LossNormalization;
use deepspec_models::{Normaliser, TrainSample, anchor_candidates, eval_mask, slot_weight};
use tch::{Device, Kind, Tensor};

use crate::schedule::{Draw, Order, Schedule, anchors, shuffled};

/// Micro-batches held ready.
const READ_AHEAD: usize = 4;

/// One forward's samples and the denominator of their loss.
pub struct MicroBatch {
    /// The samples, those without anchors included.
    pub samples: Vec<TrainSample>,
    /// What their losses are divided by.
    pub normaliser: Normaliser,
    /// Tokens in all samples.
    pub tokens: usize,
}

/// What decides which samples, anchors and denominators come.
#[derive(Debug, Clone, Copy)]
pub struct LoaderOptions {
    /// The schedule.
    pub schedule: Schedule,
    /// Seed of order and anchors.
    pub seed: u64,
    /// Anchors per sample and epoch.
    pub num_anchors: usize,
    /// γ.
    pub block_size: usize,
    /// Position k weighs exp(−k / this).
    pub decay_gamma: f64,
    /// Samples per forward.
    pub local_batch_size: usize,
    /// Whose weights a denominator sums.
    pub normalization: LossNormalization,
}

/// Hands out micro-batches in the order of the schedule.
pub struct Loader {
    ready: Receiver<anyhow::Result<MicroBatch>>,
    waited: Duration,
}

impl Loader {
    /// Starts reading at optimiser step `step`.
    pub fn start(reader: Arc<Reader>, options: LoaderOptions, step: usize) -> Self {
        let (sender, ready) = sync_channel(READ_AHEAD);
        thread::spawn(move || {
            let samples = reader.len();
            let mut order = Order::new(options.schedule.samples_per_epoch, shuffled(options.seed, samples));
            for step in step..options.schedule.max_train_steps {
                for batch in load_step(&reader, options, &mut order, step) {
                    // The trainer hangs up when it stops early.
                    let failed = batch.is_err();
                    if sender.send(batch).is_err() || failed {
                        return;
                    }
                }
            }
        });
        Self { ready, waited: Duration::ZERO }
    }

    /// The next micro-batch.
    ///
    /// # Errors
    /// If the cache is damaged, or the schedule has ended.
    pub fn next_batch(&mut self) -> anyhow::Result<MicroBatch> {
        let asked = Instant::now();
        let batch = self.ready.recv().context("the loader stopped before the schedule ended")?;
        self.waited += asked.elapsed();
        batch
    }

    /// Time spent waiting for data since the last call.
    pub fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }
}

/// A sample of a step before its states are read.
struct Planned {
    sample: usize,
    anchors: Vec<usize>,
    weight: f64,
}

fn load_step<'a, P: Fn(usize) -> Vec<usize>>(
    reader: &'a Reader,
    options: LoaderOptions,
    order: &mut Order<P>,
    step: usize,
) -> impl Iterator<Item = anyhow::Result<MicroBatch>> + 'a {
    let batch = options.schedule.gradient_accumulation_steps * options.local_batch_size;
    let planned: Vec<Planned> = (step * batch..(step + 1) * batch)
        .map(|position| plan(reader, options, order.at(position)))
        .collect();
    let weight = |planned: &[Planned]| planned.iter().map(|p| p.weight).sum::<f64>();
    let total = weight(&planned);
    let micro_batches: Vec<Vec<Planned>> = {
        let mut rest = planned.into_iter();
        (0..options.schedule.gradient_accumulation_steps)
            .map(|_| rest.by_ref().take(options.local_batch_size).collect())
            .collect()
    };
    micro_batches.into_iter().map(move |planned| {
        let normaliser = match options.normalization {
            LossNormalization::Global => total,
            // The mean over micro-batches of losses that are each divided by their own weights.
            LossNormalization::MicroBatch => {
                weight(&planned) * options.schedule.gradient_accumulation_steps as f64
            }
        };
        let samples: Vec<TrainSample> = planned
            .into_iter()
            .map(|p| Ok(train_sample(&reader.sample(p.sample)?, p.anchors)))
            .collect::<anyhow::Result<_>>()?;
        let tokens = samples.iter().map(|sample| sample.input_ids.len()).sum();
        Ok(MicroBatch { samples, normaliser: Normaliser(normaliser), tokens })
    })
}

/// Anchors and loss weight of a sample: they depend on its mask only, not on its states.
fn plan(reader: &Reader, options: LoaderOptions, draw: Draw) -> Planned {
    let (length, spans) =
        (reader.length(draw.sample).unwrap_or(0), reader.spans(draw.sample).unwrap_or_default());
    let mask = loss_mask(length, spans);
    let id = reader.id(draw.sample).unwrap_or_default();
    let anchors = anchors(&anchor_candidates(&mask), options.num_anchors, options.seed, draw.epoch, id);
    let weight = anchors
        .iter()
        .flat_map(|&anchor| 0..eval_mask(&mask, anchor, options.block_size))
        .map(|k| f64::from(slot_weight(k, options.decay_gamma)))
        .sum();
    Planned { sample: draw.sample, anchors, weight }
}

/// A cached sample as tensors on the CPU, in the cache's bfloat16.
pub fn train_sample(sample: &Sample<'_>, anchors: Vec<usize>) -> TrainSample {
    let positions = sample.last_positions();
    let hidden = sample.layout().hidden_size as i64;
    let width = hidden * sample.layout().taps.len() as i64;
    TrainSample {
        input_ids: sample.input_ids.iter().map(|&id| i64::from(id)).collect(),
        loss_mask: sample.loss_mask(),
        taps: Tensor::from_data_size(sample.taps, &[sample.len() as i64, width], Kind::BFloat16)
            .to_device(Device::Cpu),
        last: Tensor::from_data_size(sample.last, &[positions.len() as i64, hidden], Kind::BFloat16),
        last_positions: positions,
        anchors,
    }
}
