//! Describes a run before it starts, as one line per topic or as JSON.

use deepspec_capture::served::ServedLimits;
use deepspec_capture::{Dataset, ForwardLimits, TargetRuntime, TargetSpec, split_into_batches};
use deepspec_core::cli::{self, count};
use deepspec_core::recipe::{StateServers, States, StatesStorage};
use deepspec_drafters::ParamCounts;
use deepspec_drafters::Recipe;
use deepspec_models::{ModelConfig, ModelError, Weights};
use deepspec_ops::{device_name, dtype_name};
use serde_json::{Value, json};
use tch::{Device, Kind};

use crate::budget::{MemoryEstimate, MemoryEstimator, bytes_of};
use crate::evaluation::EvalPrompts;
use crate::schedule::{SampleOrder, Schedule, epoch_shuffle};
use crate::setup::weight_dtype;

/// Everything that `--plan` describes.
pub struct Plan<'a> {
    pub costs: MemoryEstimator<'a>,
    pub runtime: TargetRuntime,
    /// Where the target's sizes come from.
    pub origin: String,
    /// The samples and their schedule, or the reason why they are not available yet.
    pub data: Result<PlanData<'a>, String>,
}

/// The samples and their schedule.
pub struct PlanData<'a> {
    pub source: &'a TargetSpec,
    pub dataset: &'a Dataset,
    pub schedule: Schedule,
    /// Prompts of the evaluations, if there are any.
    pub prompts: Option<&'a EvalPrompts>,
}

/// The target's forwards in the first epoch.
struct TargetForwards {
    tokens: usize,
    forwards: usize,
}

impl Plan<'_> {
    fn recipe(&self) -> &Recipe {
        self.costs.recipe
    }

    /// The plan as text.
    ///
    /// # Errors
    /// Fails if the target's weights cannot be opened.
    pub fn text(&self) -> anyhow::Result<String> {
        let known = self.data.as_ref().ok();
        let lines = [
            ("drafter", Some(self.drafter_line())),
            ("sizes", known.is_none().then(|| self.origin.clone())),
            (
                "data",
                Some(self.data.as_ref().map_or_else(|none| format!("none yet: {none}"), PlanData::text)),
            ),
            ("states", Some(self.states_line())),
            ("target", self.needs_target().then(|| self.target_line()).transpose()?),
            ("system prompt", known.map(PlanData::system_prompt)),
            ("schedule", Some(self.schedule_line())),
            ("memory", Some(self.memory_line(&self.peak_memory()?))),
        ];
        let lines =
            lines.into_iter().filter_map(|(topic, text)| Some(cli::wrap_paragraph(topic, 14, &text?)));
        Ok(lines.collect::<Vec<_>>().join("\n"))
    }

    /// The plan as JSON.
    ///
    /// # Errors
    /// As [`Self::text`].
    pub fn json(&self) -> anyhow::Result<Value> {
        let (train, memory) = (&self.recipe().train, self.peak_memory()?);
        let known = self.data.as_ref().ok();
        let counts = known.map(|data| data.dataset.counts());
        Ok(json!({
            "name": self.recipe().name,
            "trainable_weights": self.costs.weights.trainable,
            "frozen_weights": self.costs.weights.frozen,
            "target": self.origin,
            "data_missing": self.data.as_ref().err(),
            "samples": counts.map(|counts| counts.samples),
            "tokens": counts.map(|counts| counts.tokens),
            "supervised_tokens": counts.map(|counts| counts.supervised_tokens),
            "cache_bytes_per_token": self.bytes_per_token(),
            "max_length": self.recipe().data.max_length,
            "target_dtype": self.needs_target().then(|| dtype_name(self.runtime.dtype)),
            "steps": known.map(|data| data.schedule.max_train_steps).or(train.max_train_steps),
            "steps_per_epoch": known.map(|data| data.schedule.steps_per_epoch),
            "epochs": known.map(|data| data.schedule.num_train_epochs),
            "global_batch_size": train.global_batch_size,
            "local_batch_size": train.local_batch_size,
            "max_tokens_per_batch": train.max_tokens_per_batch,
            "processes": self.costs.processes,
            "memory": memory,
            "memory_total": if self.is_on_gpu() { memory.device_bytes() } else { memory.total_bytes() },
            "host_memory_total": if self.is_on_gpu() { memory.host_bytes() } else { memory.total_bytes() },
        }))
    }

    fn drafter_line(&self) -> String {
        let title = deepspec_drafters::drafter_title(self.recipe().drafter.kind());
        let (gamma, ParamCounts { trainable, frozen, .. }) =
            (self.costs.drafter_plan.draft_len(), self.costs.weights);
        let frozen = if frozen > 0 { format!(", {frozen} frozen") } else { String::new() };
        format!("{}: {title}, γ = {gamma}, {trainable} trainable weights{frozen}", self.recipe().name)
    }

    /// Bytes of one token in the cache: bfloat16 rows of every tap and of the final hidden state.
    fn bytes_per_token(&self) -> usize {
        (self.recipe().target.layer_ids.len() + 1) * self.costs.target.hidden_size as usize * 2
    }

    fn states_line(&self) -> String {
        let known = self.data.as_ref().ok();
        let bytes = match known {
            Some(data) => {
                data.dataset.stored_bytes().map_or(String::new(), |bytes| format_megabytes(bytes as f64))
            }
            None => format!("at most {:.1} kB per token", self.bytes_per_token() as f64 / 1e3),
        };
        let States { storage, servers, .. } = &self.recipe().data.states;
        let origin = match servers {
            Some(StateServers { urls, .. }) => format!("from {}", urls.join(", ")),
            None => "online".into(),
        };
        match storage {
            StatesStorage::Cache(dir) => format!("cache {dir}, {bytes}"),
            StatesStorage::Online => format!("{origin}, nothing on disk"),
            StatesStorage::Hybrid(dir) if known.is_none_or(|data| data.dataset.computes_states()) => {
                format!("{origin} in the first epoch, which writes {dir}, {bytes}; then from there")
            }
            StatesStorage::Hybrid(dir) => format!("cache {dir}, {bytes}, which an earlier run has finished"),
        }
    }

    /// Whether the target runs beside the trainer.
    fn needs_target(&self) -> bool {
        match &self.data {
            Ok(data) => data.dataset.needs_target(),
            Err(_) => self.recipe().data.states.runs_target(),
        }
    }

    fn target_line(&self) -> Result<String, ModelError> {
        let TargetRuntime { device, dtype, .. } = self.runtime;
        let work = self.data.as_ref().map_or(String::new(), |data| {
            let TargetForwards { tokens, forwards } = self.count_forwards(data);
            let per_step = forwards as f64 / data.schedule.steps_per_epoch as f64;
            format!("{tokens} tokens per epoch in {forwards} forwards ({per_step:.1} per step); ")
        });
        let size = |values| format_megabytes(bytes_of(values, dtype) as f64);
        Ok(format!(
            "on {} in {}: {work}{} of weights, {} of keys, values and recurrent states",
            device_name(device),
            dtype_name(dtype),
            size(self.target_weight_count()?),
            format_megabytes(self.kv_cache_bytes() as f64),
        ))
    }

    /// Values of the target's weights. Without the data they are computed from the target's sizes.
    fn target_weight_count(&self) -> Result<usize, ModelError> {
        let Ok(data) = &self.data else { return Ok(self.costs.target.weight_count()) };
        Ok(Weights::open_target(&data.source.dir, "the target", self.runtime.device, self.runtime.dtype)?
            .value_count())
    }

    /// Bytes of the resident target: its weights and KV cache.
    fn resident_target_bytes(&self) -> Result<u64, ModelError> {
        Ok(bytes_of(self.target_weight_count()?, self.runtime.dtype) + self.kv_cache_bytes())
    }

    /// Counts the target's tokens and forwards in the first epoch. Later epochs have about as many
    /// forwards.
    fn count_forwards(&self, data: &PlanData) -> TargetForwards {
        let Schedule { samples_per_epoch, steps_per_epoch, .. } = data.schedule;
        let per_step = self.runtime.per_step;
        let mut order =
            SampleOrder::new(samples_per_epoch, epoch_shuffle(self.recipe().seed, data.dataset.len()));
        let budget = self.forward_budget();
        let mut passes = TargetForwards { tokens: 0, forwards: 0 };
        for step in 0..steps_per_epoch {
            let places = step * per_step..(step + 1) * per_step;
            let lengths: Vec<usize> =
                places.map(|place| data.dataset.length(order.sample_at(place).sample)).collect();
            passes.tokens += lengths.iter().sum::<usize>();
            passes.forwards += split_into_batches(lengths.iter().copied(), budget).len();
        }
        passes
    }

    /// Bytes of the target's KV cache, and of its states in linear attention, if all sequences are as long as the
    /// longest sample.
    fn kv_cache_bytes(&self) -> u64 {
        let (target, dtype) = (&self.costs.target, self.runtime.dtype);
        let sequences = self.forward_budget().sequences;
        bytes_of(target.kv_cache_numel(sequences, self.longest_sample()), dtype)
            + target.linear_attention_bytes(sequences, dtype) as u64
    }

    fn forward_budget(&self) -> ForwardLimits {
        ForwardLimits::new(self.longest_sample(), self.runtime.device)
    }

    /// Tokens of the longest sample; without the data it is the longest possible.
    fn longest_sample(&self) -> usize {
        self.data.as_ref().map_or(self.recipe().data.max_length, |data| data.dataset.longest())
    }

    fn schedule_line(&self) -> String {
        let train = &self.recipe().train;
        let (samples, local) = (train.global_batch_size, train.local_batch_size);
        let each = match train.max_tokens_per_batch {
            None => format!("{}, {local} per forward", count(samples, "sample")),
            Some(tokens) => format!("{samples} samples, at most {local} and {tokens} tokens per forward"),
        };
        match (&self.data, train.max_train_steps) {
            (Ok(PlanData { schedule, .. }), _) => format!(
                "{} of {each}; {} per epoch, {} begun",
                count(schedule.max_train_steps, "step"),
                count(schedule.steps_per_epoch, "step"),
                count(schedule.num_train_epochs, "epoch")
            ),
            (Err(_), Some(steps)) => format!("{} of {each}", count(steps, "step")),
            (Err(_), None) => format!("{} in steps of {each}", count(train.num_train_epochs, "epoch")),
        }
    }

    /// Bytes that states from servers need: files in flight in float32, as they are and converted, and
    /// a float32 LM head.
    fn served_bytes(&self) -> u64 {
        let States { storage, servers, .. } = &self.recipe().data.states;
        let Some(servers) = servers.as_ref().filter(|_| !matches!(storage, StatesStorage::Cache(_))) else {
            return 0;
        };
        let ModelConfig { hidden_size, vocab_size, .. } = self.costs.target;
        let layers = self.recipe().target.layer_ids.len() + 1;
        let in_flight = servers.urls.len() * ServedLimits::default().tokens_per_server;
        let values = 2 * in_flight * layers * *hidden_size as usize + (hidden_size * vocab_size) as usize;
        bytes_of(values, Kind::Float)
    }

    /// Peak memory of a process.
    ///
    /// # Errors
    /// As [`Self::text`].
    pub fn peak_memory(&self) -> anyhow::Result<MemoryEstimate> {
        let Ok(data) = &self.data else {
            let states = &self.recipe().data.states;
            let target =
                if states.runs_target() { self.resident_target_bytes()? } else { self.served_bytes() };
            let cache = if states.storage == StatesStorage::Online { 0 } else { u64::MAX };
            let states = if target > 0 { self.runtime.device } else { Device::Cpu };
            return Ok(self.costs.estimate_memory(&self.costs.worst_case_forwards(), states, target, cache));
        };
        let (states, target) = match data.dataset.needs_target() {
            true => (self.runtime.device, self.resident_target_bytes()?),
            false => (Device::Cpu, self.served_bytes()),
        };
        let kind = weight_dtype(self.recipe().train.precision);
        let asked = |asked: &EvalPrompts| {
            asked.memory_bytes(
                data.source,
                self.costs.weights.drafter_weights(),
                self.costs.drafter_plan.draft_len(),
                self.costs.device,
                kind,
            )
        };
        let asking = data.prompts.map(asked).transpose()?.unwrap_or_default();
        let cache = data.dataset.stored_bytes().unwrap_or(0);
        let largest = self.costs.largest_forwards(data.dataset, data.schedule);
        let memory = self.costs.estimate_memory(&largest, states, target + asking.always, cache);
        // Decoding reuses the memory of the last training pass; count only the excess.
        let beside = asking.decoding.saturating_sub(memory.activations);
        Ok(MemoryEstimate { samples: data.dataset.sample_bytes(), target: memory.target + beside, ..memory })
    }

    /// Whether the drafter is on a GPU.
    fn is_on_gpu(&self) -> bool {
        self.costs.device != Device::Cpu
    }

    fn memory_line(&self, memory: &MemoryEstimate) -> String {
        let activations = match memory.activations_measured {
            true => "activations (measured)",
            false => "activations (estimated)",
        };
        let parts = [
            ("embedding and head", memory.frozen),
            ("weights", memory.weights),
            ("gradients", memory.gradients),
            ("optimiser", memory.optimizer),
            (activations, memory.activations),
            ("the target", memory.target),
            ("states", memory.staged),
        ];
        let host = [
            ("states ahead", memory.loader),
            ("samples", memory.samples),
            ("pages of the cache", memory.cache),
            ("the program", memory.program),
        ];
        let list = |parts: &[(&str, u64)]| {
            let parts = parts.iter().filter(|(_, bytes)| *bytes > 0);
            parts
                .map(|(what, bytes)| format!("{} {what}", format_megabytes(*bytes as f64)))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let total = |bytes: u64| format_megabytes(bytes as f64);
        if self.is_on_gpu() {
            let (device, on_host) = (total(memory.device_bytes()), total(memory.host_bytes()));
            format!(
                "{device} per GPU: {}; {on_host} of the host's per process: {}",
                list(&parts),
                list(&host)
            )
        } else {
            let all = [&parts[..], &host[..]].concat();
            format!("{} per process: {}", total(memory.total_bytes()), list(&all))
        }
    }
}

impl PlanData<'_> {
    fn text(&self) -> String {
        let counts = self.dataset.counts();
        format!(
            "{} samples, {} tokens, {} supervised",
            counts.samples, counts.tokens, counts.supervised_tokens
        )
    }

    fn system_prompt(&self) -> String {
        let prompt = self.source.identity.system_prompt.as_deref().unwrap_or("none");
        format!("{prompt} (for rows that have none)")
    }
}

fn format_megabytes(bytes: f64) -> String {
    format!("{:.1} MB", bytes / 1e6)
}
