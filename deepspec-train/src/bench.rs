//! `--bench`: times optimiser steps of a recipe on random hidden states.

use std::io::Write;
use std::num::NonZeroUsize;
use std::time::Duration;

use anyhow::Context;
use deepspec_capture::{StatesError, check_recipe_fits};
use deepspec_core::cli::{self, UsageError};
use deepspec_cost::estimate::{ADAMW_BYTES_PER_WEIGHT, MeasuredWork, Stage, Work};
use deepspec_drafters::Recipe;
use deepspec_ops::{StepTrace, device_name};
use serde_json::{Value, json};
use tch::Device;

use crate::args::Args;
use crate::dummy_data::random_samples;
use crate::dummy_run::{DummyPass, DummyRun, random_embed_and_head};
use crate::gpu_info;
use crate::loader::{MAX_MICRO_BATCHES, max_samples_ahead};
use crate::optimizer::AdamW;
use crate::schedule;
use crate::setup::weight_dtype;
use crate::staging::HostToDeviceCopier;
use crate::target_shape::TargetShape;

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
    let shape = TargetShape::resolve(recipe, args.verbosity())?;
    let drafter_plan = check_recipe_fits(recipe, &shape.config).map_err(StatesError::report)?;
    let train = &recipe.train;
    // The samples of one step suffice, so the data of the run is not read.
    schedule::from_recipe(recipe, train.global_batch_size, processes)?;
    let of_forward = schedule::samples_per_forward(train, recipe.data.max_length);
    let per_step = train.global_batch_size / processes;
    let forwards: Vec<usize> =
        (0..per_step).step_by(of_forward).map(|first| of_forward.min(per_step - first)).collect();
    let kind = weight_dtype(train.precision);
    if let Some(peak) = args.peak_tflops.filter(|peak| !(*peak > 0.0 && peak.is_finite())) {
        return Err(UsageError(format!("--peak-tflops {peak} is no positive number")).into());
    }
    let name = gpu_info::gpu_name(device);
    let peak_tflops = args.peak_tflops.or_else(|| gpu_info::peak_tflops(name.as_deref()?, kind));

    let (embed, head) = random_embed_and_head(&shape.config, device, kind);
    let drafter = drafter_plan.build(&embed, &head, recipe.seed, kind);
    let optimizer = AdamW::new(drafter.parameters(), train.weight_decay, train.max_grad_norm);
    let weights = optimizer.trainable_weight_count();
    let last = drafter_plan.final_states();
    let passes = forwards.len();
    let staging = HostToDeviceCopier::for_device(device);
    let drafter_plan = drafter_plan.as_ref();
    let pass = DummyPass { recipe, drafter_plan, drafter, device, staging };
    let run = DummyRun { pass, optimizer, forwards };
    // As many micro-batches as a loader holds, and the samples that it reads ahead.
    let batches: Vec<_> =
        (0..MAX_MICRO_BATCHES).map(|number| random_samples(recipe, &shape.config, last, number)).collect();
    let beside = (0..max_samples_ahead(recipe)).flat_map(|number| {
        random_samples(recipe, &shape.config, last, MAX_MICRO_BATCHES + number).into_iter().take(1)
    });
    let _beside: Vec<_> = beside.collect();
    let mut trace = match &args.torch_profile {
        Some(path) => StepTrace::new(path, device).map_err(UsageError)?,
        None => StepTrace::disabled(),
    };
    let measured = run.time_steps(steps.get(), &batches, &mut trace)?;
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
        "device": name.clone().unwrap_or_else(|| device_name(device)),
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
                work: Work { bytes: ADAMW_BYTES_PER_WEIGHT * (weights * steps.get()) as f64, ..Work::default() },
                seconds: measured.parts.optimizer.as_secs_f64(),
            },
        ],
        "device_memory_peak_bytes": measured.device.map(|memory| memory.peak),
        "device_memory_reserved_peak_bytes": measured.device.map(|memory| memory.reserved_peak),
    });
    let text = if args.json { serde_json::to_string_pretty(&found)? } else { render(&found) };
    writeln!(cli::stdout(), "{text}").context("writing the result")
}

/// The dtype of a recipe's `train.precision`.
fn dtype_of_precision(precision: &str) -> &str {
    match precision {
        "fp32" => "float32",
        "bf16" => "bfloat16",
        other => other,
    }
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
        ("device", format!("{} in {}", text("device"), dtype_of_precision(&text("precision")))),
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
