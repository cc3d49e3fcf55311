//! What a run holds in memory, worked out before it does.

use deepspec_capture::cache::PAGES_KEPT;
use deepspec_capture::{Dataset, batches, readers};
use deepspec_core::FinalStates;
use deepspec_core::recipe::{Precision, Recipe, ShardingStrategy, States};
use deepspec_drafters::{DrafterPlan, PassBytes, SampleSize, WeightCounts};
use deepspec_models::ModelConfig;
use serde::Serialize;
use tch::{Device, Kind};

use crate::dummy_data;
use crate::loader::{HELD, mask};
use crate::schedule::{Order, Schedule, forward_budget, forward_samples, of_rank, shuffled};
use crate::setup::kind;
use crate::staging::{LOCKED, STAGED};

/// Bytes of one process by part.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Memory {
    /// The program and its libraries, resident before anything is loaded.
    pub program: u64,
    /// Code that its libraries compile for the products of a pass.
    pub code: u64,
    /// The target's embedding and head, which the drafter shares.
    pub frozen: u64,
    /// Working weights.
    pub weights: u64,
    /// Their gradients, and the float32 sums of them where the weights are narrower. Copies of small ones, which travel together to other
    /// processes, are not counted.
    pub gradients: u64,
    /// Masters, where they are apart, and two moments, in float32.
    pub optimizer: u64,
    /// What the largest micro-batch keeps for its backward.
    pub activations: u64,
    /// What its losses or its attention work with on top.
    pub workspace: u64,
    /// Micro-batches that the loader holds ready, with their states: those on the host.
    pub loader: u64,
    /// States that are on a GPU, or on their way there, before they are learned from.
    pub staged: u64,
    /// Tokens, spans and ids of the samples: all of them, but of those that the target sees while training only the pages of their file that
    /// were read last.
    pub samples: u64,
    /// Pages of the cache's shards that reading leaves in the process; the system takes them back when it needs them.
    pub cache: u64,
    /// The resident target: weights for states and for evaluations, keys and values. Of what decoding takes only what exceeds a training pass, because
    /// the two never run together.
    pub target: u64,
}

impl Memory {
    /// What a GPU holds, where the drafter and a resident target are on one.
    pub fn on_device(&self) -> u64 {
        self.frozen
            + self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.workspace
            + self.target
            + self.staged
    }

    /// What is the host's even then.
    pub fn on_host(&self) -> u64 {
        self.program + self.code + self.loader + self.samples + self.cache
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.on_device() + self.on_host()
    }
}

/// What the drafter costs by itself.
pub struct Costs<'a> {
    /// The run.
    pub recipe: &'a Recipe,
    /// The target's sizes.
    pub target: &'a ModelConfig,
    /// The drafter.
    pub drafter_plan: &'a dyn DrafterPlan,
    /// Its weights.
    pub weights: WeightCounts,
    /// Processes of the job.
    pub processes: usize,
    /// Bytes resident before anything was loaded.
    pub program: u64,
    /// Where it learns.
    pub device: Device,
}

impl Costs<'_> {
    /// The memory of a run whose largest forwards are `largest`; `target` bytes go to a resident target, `cache` bytes lie on disk.
    /// `states` says where states come from: the CPU, or the GPU of a resident target.
    pub fn memory(&self, largest: &Largest, states: Device, target: u64, cache: u64) -> Memory {
        let hybrid = matches!(self.recipe.data.states, States::Hybrid(_));
        // Micro-batches on the host, those in page-locked memory, and those on the GPU.
        let (held, locked, staged) = match (self.device, states) {
            (Device::Cpu, _) => (HELD, 0, 0),
            (_, Device::Cpu) => (HELD, LOCKED, STAGED),
            _ if hybrid => (HELD, LOCKED, HELD + STAGED),
            _ => (0, 0, HELD + STAGED),
        };
        let [held, locked, staged] = [held, locked, staged].map(|batches| batches as u64);
        let train = &self.recipe.train;
        let kind = kind(train.precision);
        let WeightCounts { trained, frozen } = self.weights;
        let (weights, bytes) = (trained as u64, kind.elt_size_in_bytes() as u64);
        let (gradients, optimizer) = match train.precision {
            Precision::Bf16 => (2 + 4, 4 + 8),
            Precision::Fp32 => (4, 8),
        };
        // Of whole parameters a rank may have a little more than its share.
        let optimizer = match train.sharding_strategy {
            ShardingStrategy::NoShard => weights * optimizer,
            ShardingStrategy::ShardOptimizer => weights * optimizer / self.processes as u64,
        };
        let ends = if self.target.tie_word_embeddings { 1 } else { 2 };
        let pass = &largest.pass;
        Memory {
            program: self.program,
            code: self.drafter_plan.code_bytes(kind, self.device) as u64,
            frozen: ends * (self.target.vocab_size * self.target.hidden_size) as u64 * bytes,
            weights: (weights + frozen as u64) * bytes,
            gradients: weights * gradients,
            optimizer,
            activations: pass.activations() as u64,
            workspace: pass.workspace() as u64,
            loader: (held + locked) * largest.states + read_beside(self.recipe) as u64 * largest.sample,
            staged: staged * largest.states,
            samples: 0,
            // What is being read is counted among the pages only when it has been.
            cache: cache.min(PAGES_KEPT + (readers() as u64 - 1) * largest.sample),
            target,
        }
    }

    /// Bytes of a micro-batch's states, as a cache holds them: taps of all tokens, and the final states that the drafter asks for.
    fn states(&self, samples: &[SampleSize]) -> u64 {
        let taps = self.recipe.target.layer_ids.len();
        let last = |sample: &SampleSize| match self.drafter_plan.final_states() {
            FinalStates::Supervised => sample.supervised,
            FinalStates::All => sample.tokens,
        };
        let rows: usize = samples.iter().map(|sample| taps * sample.tokens + last(sample)).sum();
        rows as u64 * self.target.hidden_size as u64 * 2
    }

    fn size(&self, mask: &[bool]) -> SampleSize {
        let mut first = |candidates: &[usize], count: usize| candidates.iter().copied().take(count).collect();
        SampleSize {
            tokens: mask.len(),
            supervised: mask.iter().filter(|&&supervised| supervised).count(),
            anchors: self.drafter_plan.anchors(mask, &mut first).len(),
        }
    }

    /// The first epoch's forwards, of all ranks, that take the most.
    pub fn largest(&self, dataset: &Dataset, schedule: Schedule) -> Largest {
        let Schedule { samples_per_epoch, samples_per_step, .. } = schedule;
        let mut order = Order::new(samples_per_epoch, shuffled(self.recipe.seed, dataset.len()));
        let mut size = |position| self.size(&mask(&dataset.facts(order.at(position).sample)));
        let mut largest = Largest::default();
        for first in (0..samples_per_epoch).step_by(samples_per_step) {
            let step: Vec<SampleSize> = (first..first + samples_per_step).map(&mut size).collect();
            for rank in 0..self.processes {
                let own: Vec<SampleSize> = of_rank(&step, rank, self.processes).copied().collect();
                let forwards =
                    batches(own.iter().map(|size| size.tokens), forward_budget(&self.recipe.train));
                forwards.into_iter().for_each(|forward| self.add(&mut largest, &own[forward]));
            }
        }
        largest
    }

    /// Forwards of samples of one length, supervised as those of a bench are: as long as the recipe lets them be or, where tokens are
    /// limited, shorter and more of them, which may have more anchors.
    pub fn longest(&self) -> Largest {
        const SHORTEST: usize = 16;
        let (train, most) = (&self.recipe.train, self.recipe.data.max_length);
        let shorter = |&length: &usize| Some(length / 2).filter(|&next| next >= SHORTEST);
        let mut largest = Largest::default();
        for length in std::iter::successors(Some(most), shorter) {
            let samples = forward_samples(train, length);
            self.add(&mut largest, &vec![self.size(&dummy_data::loss_mask(length)); samples]);
        }
        largest
    }

    /// Takes note of a forward.
    fn add(&self, largest: &mut Largest, forward: &[SampleSize]) {
        let pass = self.drafter_plan.pass_bytes(forward, kind(self.recipe.train.precision), self.device);
        if largest.pass.peak() < pass.peak() {
            largest.pass = pass;
        }
        largest.states = largest.states.max(self.states(forward));
        let samples = forward.iter().map(|sample| self.states(std::slice::from_ref(sample)));
        largest.sample = samples.max().unwrap_or(0).max(largest.sample);
    }
}

/// What the forwards that take the most come to, each part of the one that takes the most of it.
#[derive(Default)]
pub struct Largest {
    /// In a training pass.
    pass: PassBytes,
    /// Bytes of the states of its samples.
    states: u64,
    /// Of a single one's.
    sample: u64,
}

/// Samples that are read of a cache beside those of the micro-batch that is wanted next, at most.
pub fn read_beside(recipe: &Recipe) -> usize {
    let train = &recipe.train;
    let ends_with_it =
        train.max_tokens_per_batch.is_none() && train.local_batch_size.is_multiple_of(readers());
    if matches!(recipe.data.states, States::Online) || ends_with_it { 0 } else { readers() - 1 }
}

/// Bytes of so many values.
pub fn bytes_of(values: usize, kind: Kind) -> u64 {
    (values * kind.elt_size_in_bytes()) as u64
}
