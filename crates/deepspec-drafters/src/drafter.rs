//! Traits of drafters, as the programs use them.

use std::path::Path;

use deepspec_core::{FinalStates, Slots, Tap};
use deepspec_engine::{DraftRequest, DraftSampling, Proposal, Proposer};
use deepspec_models::{ModelConfig, ModelError};
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use crate::block_common::BlockSpec;
use crate::draft_model::{DraftDecoder, SampleSize};
use crate::{LossDenominator, TrainSample};

/// Options for loading a drafter.
#[derive(Debug, Clone)]
pub struct DrafterOptions {
    /// Its device.
    pub device: Device,
    /// Dtype of weights and activations.
    pub kind: Kind,
    /// Most sequences at a time.
    pub slots: usize,
}

/// A drafter for evaluation and serving.
pub trait Drafter: Proposer + Send {
    /// A drafter for `slots` other sequences that shares the weights.
    fn share(&self, slots: usize) -> Box<dyn Drafter>;

    /// Target layers whose hidden states it reads.
    fn taps(&self) -> &[Tap] {
        &[]
    }

    /// Whether it has a confidence head.
    fn has_confidence(&self) -> bool {
        false
    }

    /// The draft sampling under which targets accepted more tokens at temperatures above 0. Drafters that predict the positions of a
    /// block independently gain by greedy drafts.
    fn draft_sampling(&self) -> DraftSampling;

    /// Turns the Markov head off; whether there is one.
    fn ignore_markov(&mut self) -> bool {
        false
    }

    /// Checks by the configs that the drafter was made for this target.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] naming what differs.
    fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError>;

    /// Sets the tokens per block of an autoregressive drafter, up to the number that it was trained for. Block drafters ignore it.
    fn draft(&mut self, _tokens: usize) {}

    /// A probe for the doctor that shares the weights; None for a language model, which reads no hidden states.
    fn examined(&self) -> Option<Box<dyn DrafterProbe>> {
        None
    }
}

/// A key of a drafter's settings, and the problem with its value.
pub type ConfigIssue = (&'static str, String);

/// Architecture and objective of a drafter for one target, without weights.
pub trait DrafterPlan: Send + Sync {
    /// γ, drafted tokens per block.
    fn draft_len(&self) -> usize;

    /// A drafter with the same parts at tiny sizes, and its model's sizes.
    fn smallest(&self) -> (Box<dyn DrafterPlan>, ModelConfig);

    /// A drafter with random weights, and with the target's embedding and head (`[V, d]` each, shared and frozen), on their device.
    fn build(
        &self,
        embed_tokens: &Tensor,
        lm_head: &Tensor,
        seed: u64,
        kind: Kind,
    ) -> Box<dyn TrainableDrafter>;

    /// Anchors of a sample, in order; `choose(candidates, count)` samples at most `count` of them. None for drafters without blocks.
    /// They depend on the loss mask alone: the denominator of an optimiser step is known before the forward pass.
    fn anchors(
        &self,
        loss_mask: &[bool],
        choose: &mut dyn FnMut(&[usize], usize) -> Vec<usize>,
    ) -> Vec<usize>;

    /// Final hidden states of the target that its samples need.
    fn final_states(&self) -> FinalStates;

    /// The sample's share of the denominator of the loss.
    fn loss_weight(&self, loss_mask: &[bool], anchors: &[usize]) -> f64;

    /// Metrics from the sums of its micro-batches.
    fn metrics(&self) -> Metrics;

    /// Floating-point operations of forward and backward pass over `samples`.
    fn flops(&self, samples: &[TrainSample]) -> f64;

    /// Estimated peak bytes of forward and backward pass over samples of these sizes, beside weights and gradients.
    fn activation_bytes(&self, samples: &[SampleSize], kind: Kind, device: Device) -> usize;

    /// Freezes parameters whose names have one of these prefixes.
    fn freeze(&mut self, prefixes: Vec<&'static str>);

    /// Turns activation checkpointing of the layers on; whether the drafter can.
    fn recompute(&mut self) -> bool;

    /// Numbers of weights, without embedding and head.
    fn weights(&self) -> WeightCounts;
}

/// Numbers of weights of a drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightCounts {
    /// Trained weights.
    pub trained: usize,
    /// Frozen weights.
    pub frozen: usize,
}

/// Metrics from the sums of a drafter's micro-batches.
pub struct Metrics {
    /// Number of sums.
    pub count: usize,
    /// Metrics that a log line shows beside the loss: short name and key.
    pub headline: &'static [(&'static str, &'static str)],
    /// Metrics of a logging window from its sums and its number of sequences, `loss` and `tau_probabilistic` among them.
    pub compute: Box<MetricsOfSums>,
}

/// Turns sums over a number of sequences into metrics.
pub type MetricsOfSums = dyn Fn(&[f64], usize) -> Map<String, Value>;

/// Called when gradients of further parameters are complete, with the number of complete stages so far.
pub type GradReadyHook<'a> = &'a mut dyn FnMut(usize);

/// A drafter with its objective, for a trainer.
pub trait TrainableDrafter {
    /// Forward and backward pass of one micro-batch, which adds to the gradients of the parameters.
    ///
    /// Returns the sums for [`Metrics`]: float64, detached, on the drafter's device. They add up over micro-batches and ranks. None where
    /// no token is supervised.
    ///
    /// `on_grad_ready` is called for each of the [`stages`](Self::stages) as soon as its gradients are complete.
    fn accumulate(
        &self,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Option<Tensor>;

    /// Prefixes of the names of parameters whose gradients are complete before the backward pass ends, in that order.
    fn stages(&self) -> Vec<String>;

    /// A drafter for `slots` sequences that shares the weights, also as training changes them.
    fn drafter(&self, slots: usize) -> Box<dyn Drafter>;

    /// Loads the weights of the drafter checkpoint in `dir`. Heads that it lacks keep their random weights: DSpark may start from DFlash.
    /// Returns the names of these parameters. Embedding and head stay the target's.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] with every setting that differs; any other error if `dir` is not a whole checkpoint.
    fn load_pretrained(&self, dir: &Path) -> Result<Vec<String>, ModelError>;

    /// Trained parameters by checkpoint name; they share storage with the model.
    fn parameters(&self) -> &[(String, Tensor)];

    /// All tensors of a checkpoint: parameters and frozen tensors.
    fn checkpoint(&self) -> Vec<(String, Tensor)>;

    /// The checkpoint's config.json.
    fn config_json(&self) -> Map<String, Value>;
}

/// A drafter for the doctor, which changes how weights and hidden states are read.
pub trait DrafterProbe {
    /// Its decoder, and the target layers whose hidden states it reads.
    fn decoder(&self) -> &DraftDecoder;

    /// Its blocks; None for an autoregressive drafter.
    fn block_spec(&self) -> Option<&BlockSpec>;

    /// Whether its config says which tokens the slots of a block predict.
    fn chooses_slots(&self) -> bool;

    /// Its embedding and head, `[V, d]` each.
    fn embed_and_head(&self) -> (Tensor, Tensor);

    /// A probe with these weights and other settings.
    fn with_overrides(&self, reading: &DrafterOverrides) -> Box<dyn DrafterProbe>;

    /// Teacher-forced predictions for samples with anchors of whole blocks; None where samples or blocks are too short.
    fn predict(&self, samples: &[TrainSample]) -> Option<Predictions<'_>>;
}

/// Settings of a drafter that a probe overrides.
#[derive(Default)]
pub struct DrafterOverrides<'a> {
    /// Rotary settings of this model's layers.
    pub rope_of: Option<&'a ModelConfig>,
    /// Another mask token.
    pub mask_token_id: Option<i64>,
    /// Other tokens for the slots to predict.
    pub slots: Option<Slots>,
    /// Another embedding and head, `[V, d]` each.
    pub embed_and_head: Option<(&'a Tensor, &'a Tensor)>,
}

/// Teacher-forced predictions of R rows, sorted by their position in a block.
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

/// Samples γ tokens autoregressively. `logits` computes the logits `[S, V]` after the last sampled token, and first after the anchors.
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
    Proposal::stack(draws, None)
}
