//! What the programs know of a drafter, whatever its kind.

use std::path::Path;

use deepspec_core::recipe::Recipe;
use deepspec_core::{FinalStates, Slots, Tap};
use deepspec_engine::{DraftRequest, DraftSampling, Proposal, Proposer};
use deepspec_models::{ModelConfig, ModelError};
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use crate::block_common::BlockSpec;
use crate::draft_model::{PassBytes, SampleSize};
use crate::{LossDenominator, TrainSample};

/// How a drafter is loaded.
#[derive(Debug, Clone)]
pub struct DrafterOptions {
    /// Where it runs.
    pub device: Device,
    /// Kind of weights and activations.
    pub kind: Kind,
    /// Sequences it holds at once.
    pub slots: usize,
}

/// A drafter that proposes: what evaluation and serving need.
pub trait Drafter: Proposer + Send {
    /// The same drafter for `slots` other sequences, as it was loaded: it shares the weights.
    fn share(&self, slots: usize) -> Box<dyn Drafter>;

    /// Where it taps the target.
    fn taps(&self) -> &[Tap] {
        &[]
    }

    /// Whether its proposals come with confidences.
    fn has_confidence(&self) -> bool {
        false
    }

    /// The rule under which the target was seen to accept more tokens of this kind of drafter at temperatures above 0. Each drawn token
    /// has to follow from the drawn ones before it: kinds that predict their positions side by side gain by taking the likeliest.
    fn draft_sampling(&self) -> DraftSampling;

    /// Drafts without the Markov head from now on; whether there is one.
    fn ignore_markov(&mut self) -> bool {
        false
    }

    /// Whether this drafter belongs to this target, judged by their configs.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] naming what differs.
    fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError>;

    /// Drafts `tokens` per block from now on where drafting goes token by token, a trained drafter no more than it was trained for. Block
    /// drafters compute their blocks whole.
    fn draft(&mut self, _tokens: usize) {}

    /// The model for a closer look, sharing its weights; None for a language model, which reads nothing of the target.
    fn examined(&self) -> Option<Box<dyn DrafterProbe>> {
        None
    }
}

/// A drafter's settings in a recipe, before a target is known.
pub trait Settings {
    /// All of them, defaults included.
    fn to_json(&self) -> Value;

    /// The drafter that `recipe` asks for, for this target.
    ///
    /// # Errors
    /// The setting that does not fit.
    fn fit(&self, recipe: &Recipe, target: &ModelConfig) -> Result<Box<dyn DrafterPlan>, ConfigIssue>;
}

/// A key of a drafter's settings, and what is wrong with it.
pub type ConfigIssue = (&'static str, String);

/// Architecture and objective of a drafter, fitted to a target, before any weight is there.
pub trait DrafterPlan: Send + Sync {
    /// γ, drafted tokens per block.
    fn draft_len(&self) -> usize;

    /// A drafter of the same parts at sizes whose weights and states count for nothing, and its model's sizes.
    fn smallest(&self) -> (Box<dyn DrafterPlan>, ModelConfig);

    /// A fresh drafter with the target's embedding and head (both `[V, d]`, shared and frozen), on their device.
    fn build(
        &self,
        embed_tokens: &Tensor,
        lm_head: &Tensor,
        seed: u64,
        kind: Kind,
    ) -> Box<dyn TrainableDrafter>;

    /// Where blocks start in a sample, in order; `choose(candidates, count)` draws at most `count` of them. None where the
    /// whole sequence is learned from. It depends on the sample's loss mask alone, so that the denominator of an optimiser step
    /// is known before any forward.
    fn anchors(
        &self,
        loss_mask: &[bool],
        choose: &mut dyn FnMut(&[usize], usize) -> Vec<usize>,
    ) -> Vec<usize>;

    /// Which final states of the target its samples must come with.
    fn final_states(&self) -> FinalStates;

    /// What the sample adds to the denominator of the loss.
    fn loss_weight(&self, loss_mask: &[bool], anchors: &[usize]) -> f64;

    /// What the sums of its micro-batches mean.
    fn metrics(&self) -> Box<dyn Metrics>;

    /// Floating-point operations of forward and backward over `samples`.
    fn flops(&self, samples: &[TrainSample]) -> f64;

    /// What forward and backward over samples of these sizes hold at most beside weights and gradients of this kind.
    fn pass_bytes(&self, samples: &[SampleSize], kind: Kind, device: Device) -> PassBytes;

    /// What the code that is compiled for passes over micro-batches of one size takes, in weights of this kind.
    fn code_bytes(&self, kind: Kind, device: Device) -> usize;

    /// Keeps parameters as they are whose names begin like this.
    fn freeze(&mut self, prefixes: Vec<&'static str>);

    /// Keeps of each layer its input only, and computes the rest once more for the backward; whether it can.
    fn recompute(&mut self) -> bool;

    /// Number of weights, embedding and head not counted.
    fn weights(&self) -> WeightCounts;
}

/// How many weights a drafter has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightCounts {
    /// Those that learn.
    pub trained: usize,
    /// Those that stay as they are.
    pub frozen: usize,
}

/// What the sums of a drafter's micro-batches mean.
pub trait Metrics {
    /// How many sums there are.
    fn count(&self) -> usize;

    /// Metric keys shown beside the loss, under these short names.
    fn headline(&self) -> &'static [(&'static str, &'static str)];

    /// The metrics of a window over `samples` sequences, the total `loss` and `tau_probabilistic` among them. Every mean is
    /// divided once, here.
    fn metrics(&self, sums: &[f64], samples: usize) -> Map<String, Value>;
}

/// Hears of the parameters whose gradients are complete: how many stages there are of them so far.
pub type GradReadyHook<'a> = &'a mut dyn FnMut(usize);

/// A drafter with its objective: what a trainer needs.
pub trait TrainableDrafter {
    /// Forward and backward of one micro-batch: gradients are added to those of the parameters. Gives the sums that the plan's
    /// [`Metrics`] explain, float64, detached, on the drafter's device; they add over micro-batches and ranks. None where they
    /// have nothing to add.
    ///
    /// `listener`, where there is one, hears of every one of the [`stages`](Self::stages) whose gradients are complete, while those of others are
    /// still to come; where nothing is learned it hears of none.
    fn accumulate(
        &self,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        listener: Option<GradReadyHook>,
    ) -> Option<Tensor>;

    /// Beginnings of the names of parameters whose gradients are complete before a backward ends, in the order in which they are.
    fn stages(&self) -> Vec<String>;

    /// A drafter for `slots` sequences with the weights as they are and as they become: it shares their storage.
    fn drafter(&self, slots: usize) -> Box<dyn Drafter>;

    /// Takes over the weights of the drafter checkpoint in `dir`. Heads that its drafter does not have stay fresh, so that
    /// DSpark may start from DFlash; gives the names of these parameters. The embedding and the head stay the target's.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] naming every setting that differs otherwise; any other error if `dir` is no whole checkpoint.
    fn start_from(&self, dir: &Path) -> Result<Vec<String>, ModelError>;

    /// Parameters that learn, by checkpoint name, sharing storage with the model.
    fn parameters(&self) -> &[(String, Tensor)];

    /// Everything a checkpoint holds: the parameters and what is frozen.
    fn checkpoint(&self) -> Vec<(String, Tensor)>;

    /// The checkpoint's config.json.
    fn config_json(&self) -> Map<String, Value>;
}

/// A drafter under examination: how it reads its weights and the target's states can be changed.
pub trait DrafterProbe {
    /// Its decoder's settings.
    fn model(&self) -> &ModelConfig;

    /// Where it taps the target.
    fn taps(&self) -> &[Tap];

    /// Its blocks, where it drafts whole ones behind anchors; None for one that goes token by token.
    fn anchored(&self) -> Option<&BlockSpec>;

    /// Whether its checkpoint says what the slots of its blocks predict.
    fn chooses_slots(&self) -> bool;

    /// Its embedding and head, both `[V, d]`.
    fn embed_and_head(&self) -> (Tensor, Tensor);

    /// Whether it can draft for this target at all.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] naming what differs.
    fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError>;

    /// The same weights read otherwise.
    fn read_as(&self, reading: &DrafterOverrides) -> Box<dyn DrafterProbe>;

    /// What it predicts of samples with anchors of whole blocks, teacher-forced; None where they or its blocks are too short.
    fn predict(&self, samples: &[TrainSample]) -> Option<Predictions<'_>>;
}

/// What is changed about how a drafter is read; the rest stays.
#[derive(Default)]
pub struct DrafterOverrides<'a> {
    /// The rotary settings of these layers.
    pub rope_of: Option<&'a ModelConfig>,
    /// Another mask token.
    pub mask_token_id: Option<i64>,
    /// Another convention of slots.
    pub slots: Option<Slots>,
    /// Another embedding and head, both `[V, d]`.
    pub embed_and_head: Option<(&'a Tensor, &'a Tensor)>,
}

/// Teacher-forced predictions, one position of drafted blocks after the other: R rows in all.
pub struct Predictions<'a> {
    /// Rows of each position.
    pub counts: Vec<i64>,
    /// The target's states that predict the same tokens, `[R, d]`.
    pub teacher: Tensor,
    /// The drafter's logits of `len` rows from `start`, `[len, V]` float32.
    pub logits: Box<dyn Fn(i64, i64) -> Tensor + 'a>,
    /// Sum of the confidences over all rows, of a drafter with such a head.
    pub confidence: Option<f64>,
}

/// Draws γ tokens one after the other. `logits` gives those behind the last one that was drawn, and at first behind the
/// anchors: `[S, V]`.
pub(crate) fn token_by_token(
    request: &DraftRequest,
    gamma: usize,
    mut logits: impl FnMut(Option<&Tensor>) -> Tensor,
) -> Proposal {
    let mut draws: Vec<(Tensor, Option<Tensor>)> = vec![];
    for k in 0..gamma {
        let logits = logits(draws.last().map(|(drawn, _)| drawn));
        draws.push(request.sampling.sample(&logits, &request.uniforms.select(1, k as i64)));
    }
    Proposal::of(draws, None)
}
