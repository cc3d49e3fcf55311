//! Runs training steps on random hidden states, for `--bench` and for the memory of a plan.

use std::iter;
use std::time::{Duration, Instant};

use deepspec_drafters::{DrafterPlan, LossDenominator, Recipe, SampleSize, TrainSample, TrainableDrafter};
use deepspec_engine::catch_out_of_memory;
use deepspec_models::ModelConfig;
use deepspec_ops::{CudaEvent, DeviceMemory, StepTrace, device_memory, range, reset_device_peak};
use tch::{Device, Kind, Tensor};

use crate::dist::ProcessGroup;
use crate::dummy_data::{random_sample, random_samples};
use crate::optimizer::AdamW;
use crate::schedule::AnchorDraws;
use crate::setup::weight_dtype;
use crate::staging::{self, HostToDeviceCopier};
use crate::{gpu_info, memory};

/// Time of all timed steps, by part.
#[derive(Default)]
pub struct StepTimes {
    pub data: Duration,
    pub forward_backward: Duration,
    pub optimizer: Duration,
}

/// Result of timed steps.
pub struct DummyRunResult {
    pub parts: StepTimes,
    pub total: Duration,
    pub tokens: usize,
    pub flops: f64,
    /// Resident bytes with the drafter and its optimiser loaded.
    pub loaded: Option<u64>,
    /// Peak resident bytes.
    pub peak: Option<u64>,
    /// Memory of the GPU.
    pub device: Option<DeviceMemory>,
}

/// Resident bytes of the program and its libraries. They are measured after one step of a tiny
/// drafter with the same modules on the CPU. None if the system does not report them. The step runs
/// in float32: kernels that oneDNN compiles for bfloat16 depend on shapes and are not counted.
///
/// # Errors
/// Fails if the step fails.
pub fn measure_program_memory(
    recipe: &Recipe,
    drafter_plan: &dyn DrafterPlan,
) -> anyhow::Result<Option<u64>> {
    const TOKENS: usize = 32;
    let (drafter_plan, model) = drafter_plan.tiny_plan();
    let mut recipe = recipe.clone();
    (recipe.data.max_length, recipe.train.local_batch_size) = (TOKENS, 1);
    // The learning rate does not matter here; the run itself checks it.
    recipe.train.lr = 0.0;
    let (embed, head) = random_embed_and_head(&model, Device::Cpu, Kind::Float);
    let drafter = drafter_plan.build(&embed, &head, recipe.seed, Kind::Float);
    let optimizer = AdamW::new(drafter.parameters(), recipe.train.weight_decay, recipe.train.max_grad_norm);
    let batch = random_samples(&recipe, &model, drafter_plan.final_states(), 0);
    let (forwards, device) = (vec![1], Device::Cpu);
    let drafter_plan = drafter_plan.as_ref();
    let pass = DummyPass { recipe: &recipe, drafter_plan, drafter, device, staging: None };
    DummyRun { pass, optimizer, forwards }.time_steps(1, &[batch], &mut StepTrace::disabled())?;
    Ok(memory::rss_bytes())
}

/// Peak bytes of one forward and backward pass over samples of these sizes, in addition to weights,
/// gradients and hidden states. A drafter with random weights runs it twice: the first pass
/// allocates the gradients. None on the CPU and for a GPU that reports no memory. Also None, with a
/// warning, for a GPU that has too little memory.
pub fn measure_activations(
    recipe: &Recipe,
    target: &ModelConfig,
    drafter_plan: &dyn DrafterPlan,
    device: Device,
    sizes: &[SampleSize],
) -> Option<u64> {
    if device == Device::Cpu {
        return None;
    }
    device_memory(device)?;
    let measured = catch_out_of_memory(|| {
        let kind = weight_dtype(recipe.train.precision);
        let (embed, head) = random_embed_and_head(target, device, kind);
        let drafter = drafter_plan.build(&embed, &head, recipe.seed, kind);
        // Usually the optimiser sets `requires_grad`, but a micro-step needs no optimiser.
        for (_, parameter) in drafter.parameters() {
            let _ = parameter.set_requires_grad(true);
        }
        let run = DummyPass {
            recipe,
            drafter_plan,
            drafter,
            device,
            staging: HostToDeviceCopier::for_device(device),
        };
        let sample = |(index, size): (usize, &SampleSize)| {
            let first = size.tokens - size.supervised;
            let loss_mask = (0..size.tokens).map(|position| position >= first).collect();
            random_sample(recipe, target, drafter_plan.final_states(), &format!("plan-{index}"), loss_mask)
        };
        let samples: Vec<TrainSample> = sizes.iter().enumerate().map(sample).collect();
        let drawn = run.prepare_pass(0, &samples, 1);
        run.forward_backward(&drawn);
        gpu_info::synchronize(device);
        reset_device_peak(device);
        let before = device_memory(device).map_or(0, |memory| memory.in_use);
        run.forward_backward(&drawn);
        gpu_info::synchronize(device);
        device_memory(device).map(|memory| memory.peak.saturating_sub(before))
    });
    measured.unwrap_or_else(|message| {
        let reason = message.lines().next().unwrap_or_default();
        tracing::warn!("the activations are estimated: a micro-step does not fit the GPU ({reason})");
        None
    })
}

/// A drafter with random weights that runs forward and backward passes over random hidden states.
pub struct DummyPass<'a> {
    pub recipe: &'a Recipe,
    pub drafter_plan: &'a dyn DrafterPlan,
    pub drafter: Box<dyn TrainableDrafter>,
    pub device: Device,
    pub staging: Option<HostToDeviceCopier>,
}

/// A drafter with random weights that takes optimiser steps.
pub struct DummyRun<'a> {
    pub pass: DummyPass<'a>,
    pub optimizer: AdamW,
    /// Number of samples of each forward of an optimiser step.
    pub forwards: Vec<usize>,
}

impl DummyRun<'_> {
    /// Times optimiser steps after one warm-up pass over the first batch.
    ///
    /// # Errors
    /// Fails if a gradient is not finite.
    pub fn time_steps(
        mut self,
        steps: usize,
        batches: &[Vec<TrainSample>],
        trace: &mut StepTrace,
    ) -> anyhow::Result<DummyRunResult> {
        memory::reset_peak_rss();
        reset_device_peak(self.pass.device);
        let loaded = memory::rss_bytes();
        let lr = self.pass.recipe.train.lr;
        // Warm-up: the first pass selects kernels and allocates buffers.
        self.pass.forward_backward(&self.pass.prepare_pass(0, &batches[0], self.forwards.len()));
        self.optimizer.accumulate();
        let _ = self.optimizer.step(lr, &ProcessGroup::single_process())?;
        gpu_info::synchronize(self.pass.device);
        let (mut parts, mut tokens, mut flops) = (StepTimes::default(), 0, 0.0);
        let passes = self.forwards.len();
        let sent = |run: &Self, pass: usize| {
            let count = run.forwards[(pass - 1) % passes];
            run.pass.prepare_pass(pass, &batches[pass % batches.len()][..count], passes)
        };
        // Copies hidden states one pass ahead, like a loader.
        let mut ahead = sent(&self, 1);
        let started = Instant::now();
        for step in 0..steps {
            trace.begin_step();
            for pass in 1..=passes {
                let computing = Instant::now();
                tokens += ahead.samples.iter().map(|sample| sample.input_ids.len()).sum::<usize>();
                flops += self.pass.drafter_plan.flops(&ahead.samples);
                self.pass.forward_backward(&ahead);
                self.optimizer.accumulate();
                let drawing = Instant::now();
                ahead = sent(&self, step * passes + pass + 1);
                let drawn = drawing.elapsed();
                // Synchronise once per step; within a step the host runs ahead of the GPU, as in
                // training.
                if pass == passes {
                    gpu_info::synchronize(self.pass.device);
                }
                parts.data += drawn;
                parts.forward_backward += computing.elapsed() - drawn;
            }
            let updating = Instant::now();
            let _range = range(c"optimiser");
            let norm = self.optimizer.step(lr, &ProcessGroup::single_process())?;
            gpu_info::synchronize(self.pass.device);
            parts.optimizer += updating.elapsed();
            anyhow::ensure!(norm.double_value(&[]).is_finite(), "a gradient of the bench is not finite");
        }
        let total = started.elapsed();
        let device = device_memory(self.pass.device);
        Ok(DummyRunResult { parts, total, tokens, flops, loaded, peak: memory::peak_rss_bytes(), device })
    }
}

impl DummyPass<'_> {
    fn forward_backward(&self, drawn: &PreparedPass) {
        if let Some(ready) = &drawn.ready {
            staging::wait_for_states(ready, &drawn.samples, iter::empty());
        }
        self.drafter.accumulate(&drawn.samples, drawn.normaliser, 0.0, None);
    }

    /// Chooses new anchors for the samples of pass `pass`, and starts to copy their hidden states
    /// to the GPU.
    fn prepare_pass(&self, pass: usize, samples: &[TrainSample], forwards: usize) -> PreparedPass {
        let mut weight = 0.0;
        let drawn = samples.iter().enumerate().map(|(index, sample)| {
            let draws = AnchorDraws { seed: self.recipe.seed, epoch: pass, id: &index.to_string() };
            let mut choose = |candidates: &[usize], count, draw| draws.choose(candidates, count, draw);
            let anchors = self.drafter_plan.choose_anchors(&sample.loss_mask, &mut choose);
            weight += self.drafter_plan.loss_denominator_part(&sample.loss_mask, &anchors);
            TrainSample {
                input_ids: sample.input_ids.clone(),
                loss_mask: sample.loss_mask.clone(),
                taps: sample.taps.shallow_clone(),
                last: sample.last.shallow_clone(),
                last_positions: sample.last_positions.clone(),
                anchors,
            }
        });
        let mut samples: Vec<TrainSample> = drawn.collect();
        let ready = self.staging.as_ref().and_then(|staging| staging.start_copy(&mut samples));
        PreparedPass { samples, normaliser: LossDenominator(weight * forwards as f64), ready }
    }
}

/// Samples of one pass.
struct PreparedPass {
    samples: Vec<TrainSample>,
    normaliser: LossDenominator,
    ready: Option<CudaEvent>,
}

/// A random embedding and head of the target's sizes; one shared tensor if they are tied.
pub fn random_embed_and_head(config: &ModelConfig, device: Device, kind: Kind) -> (Tensor, Tensor) {
    let fresh = || {
        let size = [config.vocab_size, config.hidden_size];
        Tensor::empty(size, (kind, device)).normal_(0.0, config.initializer_range)
    };
    let embed = fresh();
    let head = if config.tie_word_embeddings { embed.shallow_clone() } else { fresh() };
    (embed, head)
}
