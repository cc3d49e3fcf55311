//! What a run holds in memory, worked out before it does.

use deepspec_cache::PAGES_KEPT;
use deepspec_core::FinalStates;
use deepspec_core::recipe::{Precision, Recipe, ShardingStrategy};
use deepspec_drafters::{DrafterPlan, PassBytes, SampleSize, WeightCounts};
use deepspec_models::ModelConfig;
use deepspec_states::Dataset;
use serde::Serialize;
use tch::{Device, Kind};

use crate::invented;
use crate::loader::{HELD, mask};
use crate::schedule::{ForwardLimit, Order, Schedule, shuffled};
use crate::setup::kind;

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
    /// Their gradients, and the float32 sums of them where the weights are narrower.
    pub gradients: u64,
    /// Masters, where they are apart, and two moments, in float32.
    pub optimizer: u64,
    /// What the longest micro-batch keeps for its backward.
    pub activations: u64,
    /// What its losses or its attention work with on top.
    pub workspace: u64,
    /// Micro-batches that the loader holds ready, with their states.
    pub loader: u64,
    /// Tokens, spans and ids of the samples: all of them, but of those that the target sees while training only the pages of their file that
    /// were read last.
    pub samples: u64,
    /// Pages of the cache's shards that reading leaves in the process; the system takes them back when it needs them.
    pub cache: u64,
    /// The resident target, for states and for evaluations: weights, keys and values.
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
    /// The memory of a run whose largest micro-batch is `largest`; `target` bytes go to a resident target, `cache` bytes lie on disk.
    pub fn memory(&self, largest: &[SampleSize], target: u64, cache: u64) -> Memory {
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
        let pass = self.drafter_plan.pass_bytes(largest, kind, self.device);
        Memory {
            program: self.program,
            code: self.drafter_plan.code_bytes(kind, self.device) as u64,
            frozen: ends * (self.target.vocab_size * self.target.hidden_size) as u64 * bytes,
            weights: (weights + frozen as u64) * bytes,
            gradients: weights * gradients,
            optimizer,
            activations: pass.activations() as u64,
            workspace: pass.workspace() as u64,
            loader: HELD as u64 * self.states(largest),
            samples: 0,
            cache: cache.min(PAGES_KEPT),
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

    /// The samples of the first epoch's micro-batch that takes the most memory.
    pub fn largest(&self, dataset: &Dataset, schedule: Schedule) -> Vec<SampleSize> {
        let Schedule { samples_per_epoch, .. } = schedule;
        let kind = kind(self.recipe.train.precision);
        let mut order = Order::new(samples_per_epoch, shuffled(self.recipe.seed, dataset.len()));
        let mut size = |position| self.size(&mask(&dataset.facts(order.at(position).sample)));
        let peak = |samples: &Vec<SampleSize>| {
            PassBytes::peak(&self.drafter_plan.pass_bytes(samples, kind, self.device))
        };
        let sizes: Vec<SampleSize> = (0..samples_per_epoch).map(&mut size).collect();
        let forwards = ForwardLimit::of_recipe(&self.recipe.train).cut(sizes.iter().map(|size| size.tokens));
        forwards.into_iter().map(|forward| sizes[forward].to_vec()).max_by_key(peak).unwrap_or_default()
    }

    /// A micro-batch of samples as long as the recipe lets them be, supervised as those of a bench are.
    pub fn longest(&self) -> Vec<SampleSize> {
        let length = self.recipe.data.max_length;
        let samples = ForwardLimit::of_recipe(&self.recipe.train).samples_of(length);
        vec![self.size(&invented::loss_mask(length)); samples]
    }
}

/// Bytes of so many values.
pub fn bytes_of(values: usize, kind: Kind) -> u64 {
    (values * kind.elt_size_in_bytes()) as u64
}
