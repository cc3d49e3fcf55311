//! What will run, said before it does: a line per topic.

use deepspec_core::recipe::{DrafterRecipe, Precision, Recipe, States};
use deepspec_models::{ModelError, Weights};
use deepspec_states::{Budget, Dataset, Running, Source, batches};
use tch::Kind;

use crate::schedule::{Order, Schedule, shuffled};

/// Everything that the lines are made from.
pub struct Plan<'a> {
    pub recipe: &'a Recipe,
    pub source: &'a Source,
    pub dataset: &'a Dataset,
    pub schedule: Schedule,
    pub running: Running,
    /// Trainable weights of the drafter.
    pub weights: usize,
}

/// What the target does in the first epoch.
struct Passes {
    tokens: usize,
    forwards: usize,
}

impl Plan<'_> {
    /// The lines.
    ///
    /// # Errors
    /// If the target's weights cannot be opened.
    pub fn text(&self) -> Result<String, ModelError> {
        let lines = [
            ("drafter", Some(self.drafter())),
            ("data", Some(self.data())),
            ("states", Some(self.states())),
            ("target", self.dataset.needs_target().then(|| self.target()).transpose()?),
            ("system prompt", Some(self.system_prompt())),
            ("schedule", Some(self.schedule())),
            ("memory", Some(self.memory())),
        ];
        let lines = lines.into_iter().filter_map(|(topic, text)| Some(format!("{topic:<14}{}", text?)));
        Ok(lines.collect::<Vec<_>>().join("\n"))
    }

    fn drafter(&self) -> String {
        let (algorithm, gamma) = match &self.recipe.drafter {
            DrafterRecipe::Dspark(block) => ("DSpark", block.block_size),
            DrafterRecipe::Dflash(block) => ("DFlash", block.block_size),
            DrafterRecipe::Eagle3(eagle3) => ("Eagle3", eagle3.ttt_length),
        };
        format!("{}: {algorithm}, γ = {gamma}, {} trainable weights", self.recipe.name, self.weights)
    }

    fn data(&self) -> String {
        let counts = self.dataset.counts();
        format!(
            "{} samples, {} tokens, {} supervised",
            counts.samples, counts.tokens, counts.supervised_tokens
        )
    }

    fn states(&self) -> String {
        let bytes = self.dataset.stored_bytes().map_or(String::new(), |bytes| megabytes(bytes as f64));
        match &self.recipe.data.states {
            States::Cache(dir) => format!("cache {dir}, {bytes}"),
            States::Online => "online, nothing on disk".into(),
            States::Hybrid(dir) if self.dataset.needs_target() => {
                format!("online in the first epoch, which writes {dir}, {bytes}; then from there")
            }
            States::Hybrid(dir) => format!("cache {dir}, {bytes}, which an earlier run has finished"),
        }
    }

    fn target(&self) -> Result<String, ModelError> {
        let Running { device, kind, .. } = self.running;
        let Passes { tokens, forwards } = self.passes();
        let per_step = forwards as f64 / self.schedule.steps_per_epoch as f64;
        let weights = Weights::open(&self.source.dir, "the target", device, kind)?.values();
        let values = weights as f64 * bytes_of(kind);
        Ok(format!(
            "on {device:?} in {kind:?}: {tokens} tokens per epoch in {forwards} forwards ({per_step:.1} per step); {} of weights, {} of keys and values",
            megabytes(values),
            megabytes(self.histories() as f64 * bytes_of(kind)),
        ))
    }

    /// The first epoch's; later ones have other neighbours and about as many forwards.
    fn passes(&self) -> Passes {
        let Schedule { samples_per_epoch, steps_per_epoch, .. } = self.schedule;
        let per_step = self.running.per_step;
        let mut order = Order::new(samples_per_epoch, shuffled(self.recipe.seed, self.dataset.len()));
        let mut length = |position| self.dataset.facts(order.at(position).sample).input_ids.len();
        let lengths: Vec<usize> = (0..steps_per_epoch * per_step).map(&mut length).collect();
        let steps = lengths.chunks(per_step);
        let forwards = steps.map(|step| batches(step.iter().copied(), self.budget()).len()).sum();
        Passes { tokens: lengths.iter().sum(), forwards }
    }

    /// Values of the target's keys and values when all of its sequences are as long as the longest.
    fn histories(&self) -> usize {
        let heads = self.source.config.layers.iter().map(|layer| layer.attention.heads);
        let row: usize = heads.map(|heads| 2 * heads.key_value as usize * heads.dim as usize).sum();
        self.budget().sequences * self.dataset.longest().next_power_of_two() * row
    }

    fn budget(&self) -> Budget {
        Budget::new(self.dataset.longest(), self.running.device)
    }

    fn system_prompt(&self) -> String {
        let prompt = self.source.identity.system_prompt.as_deref().unwrap_or("none");
        format!("{prompt} (for rows that have none)")
    }

    fn schedule(&self) -> String {
        format!(
            "{} steps of {} samples, {} per forward; {} steps per epoch, {} epochs begun",
            self.schedule.max_train_steps,
            self.recipe.train.global_batch_size,
            self.recipe.train.local_batch_size,
            self.schedule.steps_per_epoch,
            self.schedule.num_train_epochs
        )
    }

    fn memory(&self) -> String {
        // Working weights and gradients in their kind; masters (where apart) and two moments in float32.
        let bytes_per_weight = match self.recipe.train.precision {
            Precision::Bf16 => 2 + 2 + 12,
            Precision::Fp32 => 4 + 4 + 8,
        };
        format!("{} of weights, gradients and optimiser", megabytes((self.weights * bytes_per_weight) as f64))
    }
}

fn bytes_of(kind: Kind) -> f64 {
    kind.elt_size_in_bytes() as f64
}

fn megabytes(bytes: f64) -> String {
    format!("{:.1} MB", bytes / 1e6)
}
