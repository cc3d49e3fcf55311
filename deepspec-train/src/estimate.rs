//! Estimates the time of all stages on any number of devices, from prompts to an evaluated drafter.

use std::path::{Path, PathBuf};

use deepspec_capture::ForwardLimits;
use deepspec_core::cli::UsageError;
use deepspec_core::recipe::StatesStorage;
use deepspec_core::usage;
use deepspec_cost::estimate::{
    ADAMW_BYTES_PER_WEIGHT, DecodeLoad, DiskBytes, DrafterSize, Estimate, Machine, MeasuredWork, Pipeline,
    RateSource, ScaleError, Stage, TrainingWork, Work, capture_work, decode_work, read_measured,
    speculation_work,
};
use deepspec_drafters::{ParamCounts, TrainSample};
use serde_json::{Value, json};
use tch::{Device, Tensor};

use crate::plan::Plan;
use crate::schedule::samples_per_forward;
use crate::setup::weight_dtype;

/// Optimiser state per trained weight in a checkpoint: master and two moments in float32, beside
/// the bfloat16 weights.
const OPTIMIZER_BYTES_PER_WEIGHT: f64 = 12.0;

/// Arguments of the estimate of all stages.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "All stages (with --plan)")]
pub struct EstimateArgs {
    /// Estimate how long all stages take on an accelerator: b200, h200, h100, a100, mi300x or l40s. Any other is a file (.yaml)
    /// with `bandwidth`, `bf16`, `fp8`, `fp4` and `link` per second.
    #[arg(long, value_name = "NAME|FILE", requires = "plan")]
    pub hardware: Option<String>,
    /// Estimate all stages from measurements on such a device. Files are the output of `--bench --json`, `cache plan --measure
    /// --json`, `regenerate` (its .jsonl.report.json) and `deepspec-eval run` (results.json). May be repeated.
    #[arg(long, value_name = "FILE", requires = "plan")]
    pub measured: Vec<PathBuf>,
    /// Measurements of the same kinds to compare with the estimate; the estimate does not use them. May be repeated.
    #[arg(long, value_name = "FILE", requires = "measured")]
    pub validate_on: Vec<PathBuf>,
    /// Numbers of devices, by commas.
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 8, 64], requires = "plan")]
    pub devices: Vec<usize>,
    /// Price of a device for an hour.
    #[arg(long, value_name = "PRICE", requires = "plan")]
    pub price: Option<f64>,
    /// Bandwidth between devices in bytes per second, each way. By default the makers' figure for devices in one machine, or no limit.
    /// Between machines it is a tenth of that or less.
    #[arg(long, value_name = "BYTES_PER_S", requires = "plan")]
    pub interconnect: Option<f64>,
    /// Prompts that are answered and trained on; by default the samples that are there.
    #[arg(long, value_name = "N", requires = "plan")]
    pub rows: Option<usize>,
    /// Tokens of a prompt; by default those of the samples that are there, else 200.
    #[arg(long, value_name = "N", requires = "plan")]
    pub prompt_tokens: Option<f64>,
    /// Tokens of an answer; by default those of the samples that are there, else 1000.
    #[arg(long, value_name = "N", requires = "plan")]
    pub answer_tokens: Option<f64>,
    /// Sequences that a device decodes at once.
    #[arg(long, value_name = "N", default_value_t = 64, requires = "plan")]
    pub concurrency: usize,
    /// Prompts of the evaluation; the default is that of nine public suites with the reference's caps. Each is decoded three times, as
    /// by default in `deepspec-eval run`: with both rules of draft sampling, and without the drafter.
    #[arg(long, value_name = "N", default_value_t = 3030, requires = "plan")]
    pub eval_prompts: usize,
    /// Accepted length that the estimate of the evaluation assumes.
    #[arg(long, value_name = "LENGTH", default_value_t = 4.0, requires = "plan")]
    pub accepted_length: f64,
}

impl EstimateArgs {
    /// Whether an estimate is requested.
    pub fn is_requested(&self) -> bool {
        self.hardware.is_some() || !self.measured.is_empty()
    }

    fn check(&self) -> anyhow::Result<()> {
        let positive = [
            ("--price", self.price),
            ("--interconnect", self.interconnect),
            ("--prompt-tokens", self.prompt_tokens),
            ("--answer-tokens", self.answer_tokens),
        ];
        let wrong = |value: f64| !(value > 0.0 && value.is_finite());
        if let Some((flag, value)) = positive.iter().find(|(_, value)| value.is_some_and(wrong)) {
            usage!("{flag} {}: expected a positive number", value.unwrap_or_default());
        }
        if !(self.accepted_length >= 1.0 && self.accepted_length.is_finite()) {
            usage!("--accepted-length {}: expected 1 or more", self.accepted_length);
        }
        let counts = [("--concurrency", self.concurrency), ("--eval-prompts", self.eval_prompts)];
        let devices = self.devices.iter().map(|&count| ("--devices", count));
        let rows = self.rows.map(|rows| ("--rows", rows));
        if let Some((flag, _)) = counts.into_iter().chain(devices).chain(rows).find(|(_, count)| *count == 0)
        {
            usage!("{flag} must be at least 1");
        }
        Ok(())
    }
}

/// The estimated times.
pub struct PipelineEstimate {
    machine: Machine,
    pipeline: Pipeline,
    rows: f64,
    prompt: f64,
    answer: f64,
    eval_prompts: usize,
    price: Option<f64>,
    estimates: Vec<Estimate>,
    held_out: Vec<ValidationMeasurement>,
}

/// A measurement that is compared with its estimate.
struct ValidationMeasurement {
    file: PathBuf,
    measured: MeasuredWork,
    /// Estimated seconds; None if the speed of its stage is unknown.
    estimated: Option<f64>,
}

impl PipelineEstimate {
    /// Estimates the stages of a plan; None with `--hardware` alone as long as the number of rows is
    /// unknown, because the memory of a GPU can be planned without it.
    ///
    /// # Errors
    /// Usage errors for invalid numbers, unknown hardware, files without measurements, and missing
    /// samples.
    pub fn from_plan(args: &EstimateArgs, plan: &Plan) -> anyhow::Result<Option<Self>> {
        args.check()?;
        let costs = &plan.costs;
        let value_bytes = value_bytes(args, plan);
        let drafting = DrafterSize {
            length: costs.drafter_plan.draft_len() as f64,
            weights: costs.weights.drafter_weights() as f64,
            at_once: !sample_without_states(plan, &[true; 64]).anchors.is_empty(),
        };
        let read = |file: &Path| read_measured(file, &costs.target.model_size(), Some(drafting), value_bytes);
        let usage = |error: ScaleError| UsageError(error.to_string());
        let mut machine =
            Machine::from_measurements(args.hardware.as_deref(), &args.measured, read).map_err(usage)?;
        if let Some(link) = args.interconnect {
            machine.link.bytes_per_second = link;
        }
        if args.rows.is_none() && plan.data.is_err() && args.measured.is_empty() {
            return Ok(None);
        }
        let (rows, prompt, answer) = row_and_token_counts(args, plan)?;
        if costs.recipe.data.max_length < 2 {
            usage!(
                "data.max_length is {}; a sample with an answer has two tokens at least",
                costs.recipe.data.max_length
            );
        }
        let of = |devices| build_pipeline(args, plan, drafting, (rows, prompt, answer), devices);
        let mut held_out = vec![];
        for file in &args.validate_on {
            held_out.extend(read(file).map_err(usage)?.into_iter().map(|measured| ValidationMeasurement {
                file: file.clone(),
                measured,
                estimated: machine.rates(measured.stage).map(|(rates, _)| rates.seconds(measured.work)),
            }));
        }
        let estimates =
            args.devices.iter().map(|&devices| of(devices).estimate_on(&machine, devices)).collect();
        let pipeline = of(1);
        let (eval_prompts, price) = (args.eval_prompts, args.price);
        Ok(Some(Self { machine, pipeline, rows, prompt, answer, eval_prompts, price, estimates, held_out }))
    }

    /// The estimate as text, indented below a topic.
    pub fn text(&self) -> String {
        let Self { rows, prompt, answer, eval_prompts, .. } = self;
        let mut lines =
            vec![format!("{rows} rows of {prompt:.0} + {answer:.0} tokens on {}", self.machine.name)];
        let bases = Stage::ALL.map(|stage| match self.machine.rates(stage) {
            None => format!("{stage}: nothing is known"),
            Some((_, RateSource::Stated { share })) => {
                format!("{stage}: assumes {:.0} % of the maker's peak", 100.0 * share)
            }
            Some((_, RateSource::Measured { count, worst })) => {
                format!("{stage}: by {count} measurements, at most {:.0} % off them", 100.0 * worst)
            }
        });
        lines.extend(bases);
        lines.push(format!(
            "evaluation decodes {eval_prompts} prompts three times: with both rules of draft sampling, and without the drafter"
        ));
        for estimate in &self.estimates {
            let stages = estimate
                .stages
                .iter()
                .map(|(stage, seconds)| format!("{stage} {}", format_duration(*seconds)));
            let stages: Vec<String> = stages.collect();
            let step = estimate.step_seconds.map_or(String::new(), |seconds| {
                format!(" (a step {seconds:.3} s, {:.3} s of it summing)", estimate.reduce_seconds)
            });
            let hours = estimate.device_hours();
            let money = self.price.map_or(String::new(), |price| format!(", {:.0} to pay", hours * price));
            lines.push(format!(
                "on {:<3} {}{step}: {}, {hours:.1} device hours{money}",
                estimate.devices,
                stages.join(", "),
                format_duration(estimate.seconds())
            ));
        }
        let DiskBytes { states, checkpoint } = self.pipeline.bytes;
        let reading = self.estimates.iter().filter_map(|estimate| {
            let rate = estimate.read_per_second.filter(|rate| *rate > 0.0)?;
            Some(format!("{:.2} GB/s on {}", rate / 1e9, estimate.devices))
        });
        let reading: Vec<String> = reading.collect();
        let reading = match (states > 0.0, reading.is_empty()) {
            (true, false) => format!(", which training reads at {}", reading.join(", ")),
            _ => String::new(),
        };
        let states = match states > 0.0 {
            true => format!("states at most {:.1} GB{reading}", states / 1e9),
            false => "states take no disk".into(),
        };
        lines.push(format!("{states}; a checkpoint {:.2} GB", checkpoint / 1e9));
        lines.extend(self.held_out.iter().map(|ValidationMeasurement { file, measured, estimated }| {
            let (stage, took) = (measured.stage, measured.seconds);
            let name = file.display();
            match estimated {
                Some(seconds) => {
                    let off = 100.0 * (seconds / took - 1.0);
                    format!(
                        "held out {name}: {stage} {seconds:.3} s estimated, {took:.3} s measured, {off:+.1} %"
                    )
                }
                None => {
                    format!("held out {name}: {stage} {took:.3} s measured, nothing is known to estimate it")
                }
            }
        }));
        lines.join(&format!("\n{:<14}", ""))
    }

    /// The estimate as JSON.
    pub fn json(&self) -> Value {
        let estimates = self.estimates.iter().map(|estimate| {
            let stages = estimate.stages.iter().map(|(stage, seconds)| (stage.to_string(), json!(seconds)));
            json!({
                "devices": estimate.devices, "seconds": estimate.seconds(),
                "stages": stages.collect::<serde_json::Map<_, _>>(), "step_seconds": estimate.step_seconds,
                "reduce_seconds": estimate.reduce_seconds, "read_bytes_per_second": estimate.read_per_second,
                "device_hours": estimate.device_hours(), "price": self.price.map(|price| price * estimate.device_hours()),
            })
        });
        let held_out = self.held_out.iter().map(|ValidationMeasurement { file, measured, estimated }| {
            json!({"file": file, "stage": measured.stage, "measured_s": measured.seconds, "foretold_s": estimated})
        });
        json!({
            "machine": self.machine, "rows": self.rows, "prompt_tokens": self.prompt, "answer_tokens": self.answer,
            "work": self.pipeline, "estimates": estimates.collect::<Vec<_>>(), "held_out": held_out.collect::<Vec<_>>(),
        })
    }
}

/// Rows, tokens per prompt and tokens per answer.
fn row_and_token_counts(args: &EstimateArgs, plan: &Plan) -> anyhow::Result<(f64, f64, f64)> {
    let counts = plan.data.as_ref().ok().map(|data| data.dataset.counts());
    let Some(rows) = args.rows.map(|rows| rows as u64).or(counts.map(|counts| counts.samples)) else {
        usage!("--rows is missing, and there are no samples yet to count");
    };
    let batch = plan.costs.recipe.train.global_batch_size;
    if rows < batch as u64 {
        usage!("--rows {rows} is fewer than one step of train.global_batch_size {batch}");
    }
    let each = |tokens: u64| counts.map(|counts| tokens as f64 / counts.samples.max(1) as f64);
    let answer = args.answer_tokens.or(counts.and_then(|counts| each(counts.supervised_tokens)));
    let prompt = counts.and_then(|counts| each(counts.tokens - counts.supervised_tokens));
    Ok((rows as f64, args.prompt_tokens.or(prompt).unwrap_or(200.0), answer.unwrap_or(1000.0)))
}

/// Bytes per value of the target: 2 with `--hardware`, whose rates are for bfloat16.
fn value_bytes(args: &EstimateArgs, plan: &Plan) -> f64 {
    if args.hardware.is_some() { 2.0 } else { plan.runtime.dtype.elt_size_in_bytes() as f64 }
}

/// The work of all stages on `devices` devices.
fn build_pipeline(
    args: &EstimateArgs,
    plan: &Plan,
    drafting: DrafterSize,
    (rows, prompt, answer): (f64, f64, f64),
    devices: usize,
) -> Pipeline {
    let costs = &plan.costs;
    let (recipe, target) = (costs.recipe, costs.target);
    let train = &recipe.train;
    let value_bytes = value_bytes(args, plan);
    // The share of the busiest device. Concurrency is at most the number of its rows.
    let asked = |rows: f64| {
        let own = (rows / devices as f64).ceil();
        DecodeLoad { rows: own, prompt, answer, concurrency: own.min(args.concurrency as f64), value_bytes }
    };
    let length = ((prompt + answer).round() as usize).clamp(2, recipe.data.max_length);
    let answered = (answer.round() as usize).clamp(1, length - 1);
    let loss_mask: Vec<bool> = (0..length).map(|position| position >= length - answered).collect();
    let global = train.global_batch_size as f64;
    let steps = match &plan.data {
        Ok(data) if args.rows.is_none() => data.schedule.max_train_steps as f64,
        _ => train
            .max_train_steps
            .map_or((rows / global).floor() * train.num_train_epochs as f64, |steps| steps as f64),
    };
    let width = target.hidden_size as f64;
    let taps = recipe.target.layer_ids.len() as f64;
    let kept = |last: usize| (taps * length as f64 + last as f64) * width * 2.0;
    let last = costs.drafter_plan.final_states().kept_positions(&loss_mask).len();
    let (caches, passes) = match recipe.data.states.storage {
        StatesStorage::Cache(_) | StatesStorage::Hybrid(_) => (true, 1.0),
        StatesStorage::Online => (false, steps * global / rows),
    };
    let device = if args.hardware.is_some() { Device::Cuda(0) } else { plan.runtime.device };
    let per_forward = ForwardLimits::new(length, device).tokens.max(length) as f64;
    let sequences = (rows * passes / devices as f64).ceil();
    let forwards = (sequences * length as f64 / per_forward).ceil();
    let (weights, size) = (costs.weights, target.model_size());
    let evaluated = asked(args.eval_prompts as f64);
    let drafted =
        speculation_work(&size, drafting, evaluated, args.accepted_length.min(drafting.length + 1.0));
    Pipeline {
        answers: decode_work(&size, asked(rows)),
        states: capture_work(&size, [(sequences, length as f64)], forwards, value_bytes),
        training: TrainingWork {
            steps,
            samples_per_step: train.global_batch_size,
            samples_per_forward: samples_per_forward(train, length),
            sample: Work {
                operations: costs.drafter_plan.flops(&[sample_without_states(plan, &loss_mask)]),
                ..Work::default()
            },
            update: Work { bytes: ADAMW_BYTES_PER_WEIGHT * weights.trainable as f64, ..Work::default() },
            gradients: 4.0 * weights.trainable as f64,
            read: if caches { kept(last) } else { 0.0 },
        },
        // One pass for each rule of draft sampling, and one without the drafter.
        evaluation: drafted * 2.0 + decode_work(&size, evaluated),
        bytes: DiskBytes {
            states: if caches { rows * kept(last) } else { 0.0 },
            checkpoint: 2.0 * weights.drafter_weights() as f64
                + 2.0 * embed_and_head_values(plan)
                + OPTIMIZER_BYTES_PER_WEIGHT * weights.trainable as f64
                + lora_bytes(&weights),
        },
    }
}

/// Bytes that LoRA adds to a checkpoint: the frozen weights of the target modules in bfloat16, and the matrices in float32 for PEFT.
fn lora_bytes(weights: &ParamCounts) -> f64 {
    let adapter = if weights.has_lora { 4.0 * weights.trainable as f64 } else { 0.0 };
    2.0 * weights.lora_targets as f64 + adapter
}

/// Number of values in the target's embedding and head, which a checkpoint copies.
fn embed_and_head_values(plan: &Plan) -> f64 {
    2.0 * (plan.costs.target.vocab_size * plan.costs.target.hidden_size) as f64
}

/// A sample without hidden states, enough to count operations.
fn sample_without_states(plan: &Plan, loss_mask: &[bool]) -> TrainSample {
    let mut first = |candidates: &[usize], count: usize, _| candidates.iter().copied().take(count).collect();
    let empty = || Tensor::empty([0, 0], (weight_dtype(plan.costs.recipe.train.precision), Device::Cpu));
    TrainSample {
        input_ids: vec![0; loss_mask.len()],
        loss_mask: loss_mask.to_vec(),
        taps: empty(),
        last: empty(),
        last_positions: vec![],
        anchors: plan.costs.drafter_plan.choose_anchors(loss_mask, &mut first),
    }
}

fn format_duration(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86_400.0),
    }
}
