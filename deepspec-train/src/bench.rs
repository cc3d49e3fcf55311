//! `--bench`: times optimiser steps of a recipe on random hidden states.

use std::io::Write;
use std::iter;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use anyhow::Context;
use deepspec_capture::{StatesError, check_fit};
use deepspec_core::cli::{self, UsageError};
use deepspec_cost::estimate::{Measured as MeasuredWork, Stage, UPDATE_BYTES, Work};
use deepspec_drafters::Recipe;
use deepspec_drafters::{DrafterPlan, LossDenominator, SampleSize, TrainSample, TrainableDrafter};
use deepspec_models::ModelConfig;
use deepspec_ops::{CudaEvent, DeviceMemory, StepTrace, device_memory, range, restart_device_peak};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::args::Args;
use crate::dist::ProcessGroup;
use crate::dummy_data::{random_sample, random_samples};
use crate::loader::{HELD, read_beside};
use crate::optimizer::AdamW;
use crate::schedule::{self, anchors};
use crate::setup::kind;
use crate::staging::{self, Staging};
use crate::target_shape::Shape;
use crate::{gpu_info, memory};

/// Time of all timed steps, by part.
#[derive(Default)]
struct Parts {
    data: Duration,
    forward_backward: Duration,
    optimizer: Duration,
}

/// Result of a bench.
struct Measured {
    parts: Parts,
    total: Duration,
    tokens: usize,
    flops: f64,
    /// Resident bytes with the drafter and its optimiser loaded.
    loaded: Option<u64>,
    /// Peak resident bytes.
    peak: Option<u64>,
    /// Memory of the GPU.
    device: Option<DeviceMemory>,
}

/// Times `steps` optimiser steps of one of `processes` processes. The process runs alone, so no
/// gradients are summed over ranks.
///
/// # Errors
/// Usage errors for a recipe that does not fit its target, or whose batch cannot be split.
pub fn run(
    args: &Args,
    recipe: &Recipe,
    steps: NonZeroUsize,
    device: Device,
    processes: usize,
) -> anyhow::Result<()> {
    let shape = Shape::of(&recipe.target, args.verbosity())?;
    let drafter_plan = check_fit(recipe, &shape.config).map_err(StatesError::report)?;
    let train = &recipe.train;
    // The samples of one step suffice; the run's data is not read.
    schedule::of_recipe(recipe, train.global_batch_size, processes)?;
    let of_forward = schedule::forward_samples(train, recipe.data.max_length);
    let per_step = train.global_batch_size / processes;
    let forwards: Vec<usize> =
        (0..per_step).step_by(of_forward).map(|first| of_forward.min(per_step - first)).collect();
    let kind = kind(train.precision);
    if let Some(peak) = args.peak_tflops.filter(|peak| !(*peak > 0.0 && peak.is_finite())) {
        return Err(UsageError(format!("--peak-tflops {peak} is no positive number")).into());
    }
    let name = gpu_info::name(device);
    let peak_tflops = args.peak_tflops.or_else(|| gpu_info::peak_tflops(name.as_deref()?, kind));

    let (embed, head) = random_embed_and_head(&shape.config, device, kind);
    let trainee = drafter_plan.build(&embed, &head, recipe.seed, kind);
    let optimizer = AdamW::new(trainee.parameters(), train.weight_decay, train.max_grad_norm);
    let weights = optimizer.weights();
    let last = drafter_plan.final_states();
    let passes = forwards.len();
    let staging = Staging::to(device);
    let drafter_plan = drafter_plan.as_ref();
    let bench = Bench { recipe, drafter_plan, trainee, optimizer, forwards, device, staging };
    // As many micro-batches as a loader holds, and the samples that it reads ahead.
    let batches: Vec<_> =
        (0..HELD).map(|number| random_samples(recipe, &shape.config, last, number)).collect();
    let beside = (0..read_beside(recipe))
        .flat_map(|number| random_samples(recipe, &shape.config, last, HELD + number).into_iter().take(1));
    let _beside: Vec<_> = beside.collect();
    let mut trace = match &args.profile {
        Some(path) => StepTrace::new(path, device).map_err(UsageError)?,
        None => StepTrace::none(),
    };
    let measured = bench.measure(steps.get(), &batches, &mut trace)?;
    trace.finish();

    let step_s = measured.total.as_secs_f64() / steps.get() as f64;
    let share = |part: Duration| part.as_secs_f64() / measured.total.as_secs_f64();
    let tflops = measured.flops / measured.total.as_secs_f64() / 1e12;
    let samples = steps.get() * per_step;
    let rate = |count: usize| count as f64 / measured.total.as_secs_f64();
    let above = measured.peak.zip(measured.loaded).map(|(peak, loaded)| peak.saturating_sub(loaded));
    let found = json!({
        "name": recipe.name,
        "target": shape.origin,
        "device": name.clone().unwrap_or_else(|| format!("{device:?}")),
        "precision": train.precision,
        "tool_version": deepspec_core::VERSION,
        "threads": tch::get_num_threads(),
        "trainable_weights": weights,
        "steps": steps,
        "processes": processes,
        "samples_per_step": per_step,
        "forwards_per_step": passes,
        "tokens_per_sample": recipe.data.max_length,
        "step_s": step_s,
        "data_share": share(measured.parts.data),
        "forward_backward_share": share(measured.parts.forward_backward),
        "optimizer_share": share(measured.parts.optimizer),
        "samples_per_s": rate(samples),
        "tokens_per_s": rate(measured.tokens),
        "tflop_per_step": measured.flops / steps.get() as f64 / 1e12,
        "tflop_per_s": tflops,
        "peak_tflop_per_s": peak_tflops,
        "mfu": peak_tflops.map(|peak| tflops / peak),
        "host_memory_loaded_bytes": measured.loaded,
        "host_memory_peak_bytes": measured.peak,
        "host_memory_peak_above_loaded_bytes": above,
        "work": [
            MeasuredWork {
                stage: Stage::Training,
                work: Work {
                    operations: measured.flops,
                    passes: (passes * steps.get()) as f64,
                    ..Work::default()
                },
                seconds: (measured.parts.data + measured.parts.forward_backward).as_secs_f64(),
            },
            MeasuredWork {
                stage: Stage::Training,
                work: Work { bytes: UPDATE_BYTES * (weights * steps.get()) as f64, ..Work::default() },
                seconds: measured.parts.optimizer.as_secs_f64(),
            },
        ],
        "device_memory_peak_bytes": measured.device.map(|memory| memory.peak),
        "device_memory_reserved_peak_bytes": measured.device.map(|memory| memory.reserved_peak),
    });
    let text = if args.json { serde_json::to_string_pretty(&found)? } else { render(&found) };
    writeln!(cli::stdout(), "{text}").context("writing the result")
}

/// Resident bytes of the program and its libraries, after one step of a tiny drafter with the same
/// parts on the CPU. None if the system does not report them. The step runs in float32: kernels
/// compiled for bfloat16 depend on shapes and are counted separately.
///
/// # Errors
/// Fails if the step fails.
pub fn measure_program(recipe: &Recipe, drafter_plan: &dyn DrafterPlan) -> anyhow::Result<Option<u64>> {
    const TOKENS: usize = 32;
    let (drafter_plan, model) = drafter_plan.smallest();
    let mut recipe = recipe.clone();
    (recipe.data.max_length, recipe.train.local_batch_size) = (TOKENS, 1);
    // The run itself checks its learning rate.
    recipe.train.lr = 0.0;
    let (embed, head) = random_embed_and_head(&model, Device::Cpu, Kind::Float);
    let trainee = drafter_plan.build(&embed, &head, recipe.seed, Kind::Float);
    let optimizer = AdamW::new(trainee.parameters(), recipe.train.weight_decay, recipe.train.max_grad_norm);
    let batch = random_samples(&recipe, &model, drafter_plan.final_states(), 0);
    let (forwards, device) = (vec![1], Device::Cpu);
    let drafter_plan = drafter_plan.as_ref();
    Bench { recipe: &recipe, drafter_plan, trainee, optimizer, forwards, device, staging: None }.measure(
        1,
        &[batch],
        &mut StepTrace::none(),
    )?;
    Ok(memory::resident())
}

/// Peak bytes of one forward and backward pass over samples of these sizes, beside weights,
/// gradients and hidden states. A drafter with random weights runs it twice: the first pass
/// allocates the gradients. None on the CPU, and for a GPU that reports no memory.
///
/// # Errors
/// Fails if the GPU runs out of memory.
pub fn measure_activations(
    recipe: &Recipe,
    target: &ModelConfig,
    drafter_plan: &dyn DrafterPlan,
    device: Device,
    sizes: &[SampleSize],
) -> anyhow::Result<Option<u64>> {
    if device == Device::Cpu || device_memory(device).is_none() {
        return Ok(None);
    }
    let kind = kind(recipe.train.precision);
    let (embed, head) = random_embed_and_head(target, device, kind);
    let trainee = drafter_plan.build(&embed, &head, recipe.seed, kind);
    let optimizer = AdamW::new(trainee.parameters(), recipe.train.weight_decay, recipe.train.max_grad_norm);
    let (forwards, staging) = (vec![sizes.len()], Staging::to(device));
    let bench = Bench { recipe, drafter_plan, trainee, optimizer, forwards, device, staging };
    let sample = |(index, size): (usize, &SampleSize)| {
        let loss_mask = (0..size.tokens).map(|position| position >= size.tokens - size.supervised).collect();
        random_sample(recipe, target, drafter_plan.final_states(), &format!("plan-{index}"), loss_mask)
    };
    let samples: Vec<TrainSample> = sizes.iter().enumerate().map(sample).collect();
    let drawn = bench.draw(0, &samples);
    bench.learn(&drawn);
    gpu_info::finish(device);
    restart_device_peak(device);
    let before = device_memory(device).map_or(0, |memory| memory.in_use);
    bench.learn(&drawn);
    gpu_info::finish(device);
    Ok(device_memory(device).map(|memory| memory.peak.saturating_sub(before)))
}

/// State of a bench.
struct Bench<'a> {
    recipe: &'a Recipe,
    drafter_plan: &'a dyn DrafterPlan,
    trainee: Box<dyn TrainableDrafter>,
    optimizer: AdamW,
    /// Number of samples of each forward of an optimiser step.
    forwards: Vec<usize>,
    device: Device,
    staging: Option<Staging>,
}

impl Bench<'_> {
    fn measure(
        mut self,
        steps: usize,
        batches: &[Vec<TrainSample>],
        trace: &mut StepTrace,
    ) -> anyhow::Result<Measured> {
        memory::restart_peak();
        restart_device_peak(self.device);
        let loaded = memory::resident();
        let lr = self.recipe.train.lr;
        // Warm-up: the first pass selects kernels and allocates buffers.
        self.learn(&self.draw(0, &batches[0]));
        self.optimizer.accumulate();
        let _ = self.optimizer.step(lr, &ProcessGroup::alone())?;
        gpu_info::finish(self.device);
        let (mut parts, mut tokens, mut flops) = (Parts::default(), 0, 0.0);
        let passes = self.forwards.len();
        let sent = |bench: &Self, pass: usize| {
            let count = bench.forwards[(pass - 1) % passes];
            bench.draw(pass, &batches[pass % batches.len()][..count])
        };
        // Copies hidden states one pass ahead, like a loader.
        let mut ahead = sent(&self, 1);
        let started = Instant::now();
        for step in 0..steps {
            trace.begin_step();
            for pass in 1..=passes {
                let computing = Instant::now();
                tokens += ahead.samples.iter().map(|sample| sample.input_ids.len()).sum::<usize>();
                flops += self.drafter_plan.flops(&ahead.samples);
                self.learn(&ahead);
                self.optimizer.accumulate();
                let drawing = Instant::now();
                ahead = sent(&self, step * passes + pass + 1);
                let drawn = drawing.elapsed();
                // Synchronise once per step; within a step the host runs ahead of the GPU, as in
                // training.
                if pass == passes {
                    gpu_info::finish(self.device);
                }
                parts.data += drawn;
                parts.forward_backward += computing.elapsed() - drawn;
            }
            let updating = Instant::now();
            let _range = range(c"optimiser");
            let norm = self.optimizer.step(lr, &ProcessGroup::alone())?;
            gpu_info::finish(self.device);
            parts.optimizer += updating.elapsed();
            anyhow::ensure!(norm.double_value(&[]).is_finite(), "a gradient of the bench is not finite");
        }
        let total = started.elapsed();
        let device = device_memory(self.device);
        Ok(Measured { parts, total, tokens, flops, loaded, peak: memory::peak(), device })
    }

    fn learn(&self, drawn: &Drawn) {
        if let Some(ready) = &drawn.ready {
            staging::hold(ready, &drawn.samples, iter::empty());
        }
        self.trainee.accumulate(&drawn.samples, drawn.normaliser, None);
    }

    /// The samples of pass `pass` with new anchors, and the copy of their hidden states started.
    fn draw(&self, pass: usize, samples: &[TrainSample]) -> Drawn {
        let mut weight = 0.0;
        let drawn = samples.iter().enumerate().map(|(index, sample)| {
            let mut draw = |candidates: &[usize], count| {
                anchors(candidates, count, self.recipe.seed, pass, &index.to_string())
            };
            let anchors = self.drafter_plan.anchors(&sample.loss_mask, &mut draw);
            weight += self.drafter_plan.loss_weight(&sample.loss_mask, &anchors);
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
        let ready = self.staging.as_ref().and_then(|staging| staging.bring(&mut samples));
        Drawn { samples, normaliser: LossDenominator(weight * self.forwards.len() as f64), ready }
    }
}

/// Samples of one pass.
struct Drawn {
    samples: Vec<TrainSample>,
    normaliser: LossDenominator,
    ready: Option<CudaEvent>,
}

/// A random embedding and head of the target's sizes; one shared tensor if they are tied.
fn random_embed_and_head(config: &ModelConfig, device: Device, kind: Kind) -> (Tensor, Tensor) {
    let fresh = || {
        let size = [config.vocab_size, config.hidden_size];
        Tensor::empty(size, (kind, device)).normal_(0.0, config.initializer_range)
    };
    let embed = fresh();
    let head = if config.tie_word_embeddings { embed.shallow_clone() } else { fresh() };
    (embed, head)
}

fn render(found: &Value) -> String {
    let number = |key: &str| found[key].as_f64().unwrap_or(0.0);
    let text = |key: &str| found[key].as_str().unwrap_or_default().to_string();
    let percent = |key: &str| format!("{:.1} %", 100.0 * number(key));
    let gigabytes = |key: &str| format!("{:.2} GB", number(key) / 1e9);
    let of_peak = match found["mfu"].as_f64() {
        Some(mfu) => format!(", {:.1} % of {} TFLOP/s", 100.0 * mfu, number("peak_tflop_per_s")),
        None => String::new(),
    };
    let mut lines = vec![
        ("drafter", format!("{}, {} trainable weights", text("name"), number("trainable_weights"))),
        ("target", format!("{}, random weights and states", text("target"))),
        ("device", format!("{} in {}", text("device"), text("precision"))),
        (
            "steps",
            format!(
                "{} of {} samples of {} tokens in {} forwards",
                number("steps"),
                number("samples_per_step"),
                number("tokens_per_sample"),
                number("forwards_per_step")
            ),
        ),
        (
            "step time",
            format!(
                "{:.3} s: {} data, {} forward and backward, {} optimiser",
                number("step_s"),
                percent("data_share"),
                percent("forward_backward_share"),
                percent("optimizer_share")
            ),
        ),
        (
            "throughput",
            format!("{:.2} samples/s, {:.0} tokens/s", number("samples_per_s"), number("tokens_per_s")),
        ),
        (
            "arithmetic",
            format!(
                "{:.3} TFLOP per step, {:.3} TFLOP/s{of_peak}",
                number("tflop_per_step"),
                number("tflop_per_s")
            ),
        ),
        (
            "host memory",
            format!(
                "{} at most, {} of it above the loaded state",
                gigabytes("host_memory_peak_bytes"),
                gigabytes("host_memory_peak_above_loaded_bytes")
            ),
        ),
    ];
    if found["device_memory_peak_bytes"].is_number() {
        let text = format!(
            "{} at most in tensors, {} taken from the driver",
            gigabytes("device_memory_peak_bytes"),
            gigabytes("device_memory_reserved_peak_bytes")
        );
        lines.push(("GPU memory", text));
    }
    let lines: Vec<String> = lines.iter().map(|(topic, text)| format!("{topic:<14}{text}")).collect();
    lines.join("\n")
}
