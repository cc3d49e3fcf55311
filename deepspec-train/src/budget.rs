//! What a run holds in memory, worked out before it does.

use deepspec_core::recipe::{Precision, Recipe, ShardingStrategy};
use deepspec_models::{Design, ModelConfig, PassBytes, SampleSize};
use deepspec_states::Dataset;
use serde::Serialize;
use tch::{Device, Kind};

use crate::loader::{READ_AHEAD, mask};
use crate::run;
use crate::schedule::{Order, Schedule, shuffled};

/// Bytes per device. On the CPU the program itself is among them.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Memory {
    /// The program and its libraries, resident before anything is loaded.
    pub program: u64,
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
    /// The resident target: weights, keys and values.
    pub target: u64,
}

impl Memory {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.program
            + self.frozen
            + self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.workspace
            + self.loader
            + self.target
    }
}

/// What the drafter costs by itself.
pub struct Costs<'a> {
    /// The run.
    pub recipe: &'a Recipe,
    /// The target's sizes.
    pub target: &'a ModelConfig,
    /// The drafter.
    pub design: &'a Design,
    /// Its trainable weights.
    pub weights: usize,
    /// Processes of the job.
    pub processes: usize,
    /// Bytes resident before anything was loaded.
    pub program: u64,
    /// Where it learns.
    pub device: Device,
}

impl Costs<'_> {
    /// The memory of a run whose largest micro-batch is `largest`; `target` bytes go to a resident target.
    pub fn memory(&self, largest: &[SampleSize], target: u64) -> Memory {
        let train = &self.recipe.train;
        let kind = run::kind(train.precision);
        let (weights, bytes) = (self.weights as u64, kind.elt_size_in_bytes() as u64);
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
        let pass = self.design.pass_bytes(largest, kind, self.device);
        Memory {
            program: self.program,
            frozen: ends * (self.target.vocab_size * self.target.hidden_size) as u64 * bytes,
            weights: weights * bytes,
            gradients: weights * gradients,
            optimizer,
            activations: pass.kept as u64,
            workspace: pass.attention.max(pass.objective) as u64,
            // One more is being filled, and one is being learned from.
            loader: (READ_AHEAD as u64 + 2) * self.states(largest),
            target,
        }
    }

    /// Bytes of a micro-batch's states, as a cache holds them.
    fn states(&self, samples: &[SampleSize]) -> u64 {
        let tokens: usize = samples.iter().map(|sample| sample.tokens).sum();
        let rows = self.recipe.target.layer_ids.len() + 1;
        tokens as u64 * (rows as i64 * self.target.hidden_size) as u64 * 2
    }

    /// The samples of the first epoch's micro-batch that takes the most memory.
    pub fn largest(&self, dataset: &Dataset, schedule: Schedule) -> Vec<SampleSize> {
        let Schedule { samples_per_epoch, .. } = schedule;
        let (supervision, kind) = (self.design.supervision(), run::kind(self.recipe.train.precision));
        let mut order = Order::new(samples_per_epoch, shuffled(self.recipe.seed, dataset.len()));
        let mut size = |position| {
            let mask = mask(dataset.facts(order.at(position).sample));
            let first = |candidates: &[usize], count: usize| candidates.iter().copied().take(count).collect();
            SampleSize { tokens: mask.len(), anchors: supervision.anchors(&mask, first).len() }
        };
        let sizes: Vec<SampleSize> = (0..samples_per_epoch).map(&mut size).collect();
        let peak =
            |samples: &&[SampleSize]| PassBytes::peak(&self.design.pass_bytes(samples, kind, self.device));
        let batches = sizes.chunks(self.recipe.train.local_batch_size);
        batches.max_by_key(peak).map(<[SampleSize]>::to_vec).unwrap_or_default()
    }

    /// A micro-batch of samples as long as the recipe lets them be, with all their anchors.
    pub fn longest(&self) -> Vec<SampleSize> {
        let tokens = self.recipe.data.max_length;
        let first = |candidates: &[usize], count: usize| candidates.iter().copied().take(count).collect();
        let anchors = self.design.supervision().anchors(&vec![true; tokens], first).len();
        vec![SampleSize { tokens, anchors }; self.recipe.train.local_batch_size]
    }
}

/// Bytes of so many values.
pub fn bytes_of(values: usize, kind: Kind) -> u64 {
    (values * kind.elt_size_in_bytes()) as u64
}
