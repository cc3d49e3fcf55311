//! Estimates the memory of a run before it starts.

use deepspec_capture::cache::MAX_MAPPED_BYTES;
use deepspec_capture::{Dataset, reader_threads, split_into_batches};
use deepspec_core::FinalStates;
use deepspec_core::recipe::{ShardingStrategy, StatesStorage, TrainDtype};
use deepspec_drafters::Recipe;
use deepspec_drafters::{DrafterPlan, ParamCounts, SampleSize};
use deepspec_models::ModelConfig;
use serde::Serialize;
use tch::{Device, Kind};

use crate::loader::{MAX_MICRO_BATCHES, max_samples_ahead, sample_loss_mask};
use crate::schedule::{
    SampleOrder, Schedule, epoch_shuffle, forward_budget, samples_of_rank, samples_per_forward,
};
use crate::setup::weight_dtype;
use crate::staging::{MICRO_BATCHES_ON_GPU, PINNED_MICRO_BATCHES};
use crate::{dummy_data, dummy_run};

/// Bytes of one process, by part.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct MemoryEstimate {
    /// The program and its libraries before anything is loaded.
    pub program: u64,
    /// The target's embedding and head, shared with the drafter.
    pub frozen: u64,
    /// The drafter's weights.
    pub weights: u64,
    /// Gradients, and their float32 sums if the weights are narrower. Flat copies of small
    /// gradients for the all-reduce are not counted.
    pub gradients: u64,
    /// Master weights, if separate, and the two moments, in float32.
    pub optimizer: u64,
    /// Activations, gradients of activations and loss buffers of the largest micro-batch, at their
    /// peak. More if LoRA takes more before or behind a pass.
    pub activations: u64,
    /// Whether the activations were measured in a micro-step on the GPU. Otherwise they are an
    /// estimate.
    pub activations_measured: bool,
    /// Hidden states on the host of the micro-batches in the loader.
    pub loader: u64,
    /// Hidden states on the GPU, or in transfer to it, before training uses them.
    pub staged: u64,
    /// Tokens, spans and ids of all samples. For samples that the target reads during training,
    /// only the recently read pages of their file.
    pub samples: u64,
    /// Pages of cache shards that stay mapped in the process. The system reclaims them under memory
    /// pressure.
    pub cache: u64,
    /// The resident target: its weights and KV cache, for hidden states and for evaluation.
    /// Decoding counts only where it exceeds a training pass, because the two never overlap.
    pub target: u64,
}

impl MemoryEstimate {
    /// Bytes on the GPU if the drafter and a resident target share one.
    pub fn device_bytes(&self) -> u64 {
        self.frozen
            + self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.target
            + self.staged
    }

    /// Bytes on the host if the drafter trains on a GPU.
    pub fn host_bytes(&self) -> u64 {
        self.program + self.loader + self.samples + self.cache
    }

    /// Sum of all parts.
    pub fn total_bytes(&self) -> u64 {
        self.device_bytes() + self.host_bytes()
    }
}

/// Estimates the memory of one process from these inputs.
pub struct MemoryEstimator<'a> {
    /// The recipe of the run.
    pub recipe: &'a Recipe,
    /// Sizes of the target.
    pub target: &'a ModelConfig,
    /// The drafter.
    pub drafter_plan: &'a dyn DrafterPlan,
    /// Number of drafter weights.
    pub weights: ParamCounts,
    /// Number of processes of the job.
    pub processes: usize,
    /// Resident bytes before anything was loaded.
    pub program: u64,
    /// Device of the drafter.
    pub device: Device,
    /// Whether a GPU runs one micro-step to measure the activations.
    pub measures: bool,
}

impl MemoryEstimator<'_> {
    /// Memory of a run whose largest forwards are `largest`. A resident target takes `target`
    /// bytes; the cache on disk has `cache` bytes. `states` is the device of the hidden states: the
    /// CPU, or the GPU of a resident target.
    pub fn estimate_memory(
        &self,
        largest: &ForwardMaxima,
        states: Device,
        target: u64,
        cache: u64,
    ) -> MemoryEstimate {
        let hybrid = matches!(self.recipe.data.states.storage, StatesStorage::Hybrid(_));
        // Micro-batches on the host, in page-locked memory, and on the GPU.
        let (held, locked, staged) = match (self.device, states) {
            (Device::Cpu, _) => (MAX_MICRO_BATCHES, 0, 0),
            (_, Device::Cpu) => (MAX_MICRO_BATCHES, PINNED_MICRO_BATCHES, MICRO_BATCHES_ON_GPU),
            _ if hybrid => {
                (MAX_MICRO_BATCHES, PINNED_MICRO_BATCHES, MAX_MICRO_BATCHES + MICRO_BATCHES_ON_GPU)
            }
            _ => (0, 0, MAX_MICRO_BATCHES + MICRO_BATCHES_ON_GPU),
        };
        let [held, locked, staged] = [held, locked, staged].map(|batches| batches as u64);
        let train = &self.recipe.train;
        let kind = weight_dtype(train.precision);
        let ParamCounts { trainable, frozen, lora_targets, .. } = self.weights;
        let (weights, bytes) = (trainable as u64, kind.elt_size_in_bytes() as u64);
        // LoRA's matrices are float32 in both.
        let (gradients, optimizer, trained_bytes) = match train.precision {
            TrainDtype::Bf16 if train.lora.is_none() => (2 + 4, 4 + 8, 2),
            TrainDtype::Bf16 | TrainDtype::Fp32 => (4, 8, 4),
        };
        let lora_targets = lora_targets as u64 * bytes;
        // Sharding is by whole parameters, so a rank may have slightly more than its share.
        let optimizer = match train.sharding_strategy {
            ShardingStrategy::NoShard => weights * optimizer,
            ShardingStrategy::ShardOptimizer => weights * optimizer / self.processes as u64,
        };
        let ends = if self.target.tie_word_embeddings { 1 } else { 2 };
        let own_head = self.drafter_plan.own_head_rows().unwrap_or(0);
        let measured = match self.measures {
            true => {
                let (drafter, forward) = (self.drafter_plan, largest.forward.as_slice());
                dummy_run::measure_activations(self.recipe, self.target, drafter, self.device, forward)
            }
            false => None,
        };
        MemoryEstimate {
            program: self.program,
            frozen: (ends * self.target.vocab_size as u64 + own_head as u64)
                * self.target.hidden_size as u64
                * bytes,
            weights: weights * trained_bytes + frozen as u64 * bytes + lora_targets,
            // LoRA drops the gradients of the target modules after each pass, so a measured pass has them among its activations.
            gradients: weights * gradients + if measured.is_none() { lora_targets } else { 0 },
            optimizer,
            // A pass has no activations yet when LoRA merges weights, and none any more when it adds up
            // gradients.
            activations: measured
                .unwrap_or_else(|| (largest.activations as u64).max(self.weights.lora_working_bytes(kind))),
            activations_measured: measured.is_some(),
            loader: (held + locked) * largest.states + max_samples_ahead(self.recipe) as u64 * largest.sample,
            staged: staged * largest.states,
            samples: 0,
            // The sample being read counts as mapped pages only after it was read.
            cache: cache.min(MAX_MAPPED_BYTES + (reader_threads() as u64 - 1) * largest.sample),
            target,
        }
    }

    /// Bytes of a micro-batch's hidden states in bfloat16: those of the captured layers for all
    /// tokens, and the final ones that the drafter needs.
    fn hidden_state_bytes(&self, samples: &[SampleSize]) -> u64 {
        let taps = self.recipe.target.layer_ids.len();
        let last = |sample: &SampleSize| match self.drafter_plan.final_states() {
            FinalStates::Supervised => sample.supervised,
            FinalStates::All => sample.tokens,
        };
        let rows: usize = samples.iter().map(|sample| taps * sample.tokens + last(sample)).sum();
        rows as u64 * self.target.hidden_size as u64 * 2
    }

    fn sample_size(&self, mask: &[bool]) -> SampleSize {
        let mut first =
            |candidates: &[usize], count: usize, _| candidates.iter().copied().take(count).collect();
        SampleSize {
            tokens: mask.len(),
            supervised: mask.iter().filter(|&&supervised| supervised).count(),
            anchors: self.drafter_plan.choose_anchors(mask, &mut first).len(),
        }
    }

    /// The largest forwards of the first epoch, over all ranks.
    pub fn largest_forwards(&self, dataset: &Dataset, schedule: Schedule) -> ForwardMaxima {
        let Schedule { samples_per_epoch, samples_per_step, .. } = schedule;
        let mut order = SampleOrder::new(samples_per_epoch, epoch_shuffle(self.recipe.seed, dataset.len()));
        let mut size =
            |position| self.sample_size(&sample_loss_mask(&dataset.meta(order.sample_at(position).sample)));
        let mut largest = ForwardMaxima::default();
        for first in (0..samples_per_epoch).step_by(samples_per_step) {
            let step: Vec<SampleSize> = (first..first + samples_per_step).map(&mut size).collect();
            for rank in 0..self.processes {
                let own: Vec<SampleSize> = samples_of_rank(&step, rank, self.processes).copied().collect();
                let forwards = split_into_batches(
                    own.iter().map(|size| size.tokens),
                    forward_budget(&self.recipe.train),
                );
                forwards.into_iter().for_each(|forward| self.update_maxima(&mut largest, &own[forward]));
            }
        }
        largest
    }

    /// The largest forwards if the data is unknown: all samples have one length and the loss mask
    /// of `--bench`. The lengths tried are `data.max_length`, half of it, and so on. With a token
    /// limit, a forward of many short samples may have more anchors.
    pub fn worst_case_forwards(&self) -> ForwardMaxima {
        const SHORTEST: usize = 16;
        let (train, most) = (&self.recipe.train, self.recipe.data.max_length);
        let shorter = |&length: &usize| Some(length / 2).filter(|&next| next >= SHORTEST);
        let mut largest = ForwardMaxima::default();
        for length in std::iter::successors(Some(most), shorter) {
            let samples = samples_per_forward(train, length);
            self.update_maxima(
                &mut largest,
                &vec![self.sample_size(&dummy_data::loss_mask(length)); samples],
            );
        }
        largest
    }

    /// Updates the maxima with one more forward.
    fn update_maxima(&self, largest: &mut ForwardMaxima, forward: &[SampleSize]) {
        let kind = weight_dtype(self.recipe.train.precision);
        let activations = self.drafter_plan.activation_bytes(forward, kind, self.device);
        if largest.activations < activations {
            (largest.activations, largest.forward) = (activations, forward.to_vec());
        }
        largest.states = largest.states.max(self.hidden_state_bytes(forward));
        let samples = forward.iter().map(|sample| self.hidden_state_bytes(std::slice::from_ref(sample)));
        largest.sample = samples.max().unwrap_or(0).max(largest.sample);
    }
}

/// Maxima over all forwards; each field may come from a different forward.
#[derive(Default)]
pub struct ForwardMaxima {
    /// Estimated bytes of the activations.
    activations: usize,
    /// The samples of the forward with the most activations.
    forward: Vec<SampleSize>,
    /// Bytes of the hidden states of one forward.
    states: u64,
    /// Bytes of the hidden states of one sample.
    sample: u64,
}

/// Bytes of `values` values of a dtype.
pub fn bytes_of(values: usize, kind: Kind) -> u64 {
    (values * kind.elt_size_in_bytes()) as u64
}
