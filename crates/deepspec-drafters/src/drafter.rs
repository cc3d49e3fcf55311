//! Traits with which the programs train, run and examine drafters of any kind.

use std::path::{Path, PathBuf};

use deepspec_core::recipe::LoraRecipe;
use deepspec_core::{FinalStates, SlotTarget, Tap};
use deepspec_engine::{DraftRequest, DraftSampling, Proposal, Proposer};
use deepspec_models::nn::LayerSpec;
use deepspec_models::{ModelConfig, ModelError};
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use crate::block_common::BlockSpec;
use crate::draft_model::{MERGE_BYTES, SampleSize};
use crate::{LossDenominator, TrainSample};

/// Options for loading a drafter.
#[derive(Debug, Clone)]
pub struct DrafterOptions {
    /// Device of the weights.
    pub device: Device,
    /// Dtype of weights and activations.
    pub kind: Kind,
    /// Maximum number of sequences at a time.
    pub slots: usize,
    /// Folder of the target, for drafters that read parts of it; None if there is no target.
    pub target: Option<PathBuf>,
}

/// A drafter for evaluation and serving.
pub trait Drafter: Proposer + Send {
    /// A drafter for `slots` other sequences that shares the weights.
    fn share(&self, slots: usize) -> Box<dyn Drafter>;

    /// Target layers whose hidden states the drafter reads.
    fn taps(&self) -> &[Tap] {
        &[]
    }

    /// Whether the drafter has a confidence head.
    fn has_confidence_head(&self) -> bool {
        false
    }

    /// Draft sampling with the higher measured acceptance above temperature 0: greedy for drafters that predict a block's positions
    /// independently.
    fn draft_sampling(&self) -> DraftSampling;

    /// Stops adding the Markov bias to the logits. Returns whether there is a Markov head.
    fn disable_markov_bias(&mut self) -> bool {
        false
    }

    /// Checks the drafter's config against the target's.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] naming what differs.
    fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError>;

    /// Sets the number of drafted tokens of Eagle3, P-EAGLE and MTP-1, up to the number that it was trained for, and of assistants and
    /// language models. Block drafters ignore it.
    fn set_draft_len(&mut self, _tokens: usize) {}

    /// A probe for the doctor that shares the weights; None for a language model, which reads no hidden states.
    fn probe(&self) -> Option<Box<dyn DrafterProbe>> {
        None
    }
}

/// Samples positions of a training sequence: `choose(candidates, count, draw)` returns at most `count` candidates, sorted. Samples of
/// different numbers `draw` are independent.
pub type ChoosePositions<'a> = &'a mut dyn FnMut(&[usize], usize, usize) -> Vec<usize>;

/// A key of a drafter's settings, and the problem with its value.
pub type ConfigIssue = (&'static str, String);

/// Architecture and objective of a drafter for one target, without weights.
pub trait DrafterPlan: Send + Sync {
    /// Drafted tokens per block, γ.
    fn draft_len(&self) -> usize;

    /// The plan with tiny sizes, and the sizes of its decoder, for dummy runs.
    fn tiny_plan(&self) -> (Box<dyn DrafterPlan>, ModelConfig);

    /// Builds a drafter with random weights. It shares the target's embedding and LM head, `[V, d]` each, frozen and on their device.
    fn build(
        &self,
        embed_tokens: &Tensor,
        lm_head: &Tensor,
        seed: u64,
        kind: Kind,
    ) -> Box<dyn TrainableDrafter>;

    /// Anchors of a sample, ascending. Empty for drafters that train all positions. P-EAGLE repeats an anchor once per sampled depth.
    /// Anchors depend only on the loss mask, so that the loss denominator is known before the forward pass.
    fn choose_anchors(&self, loss_mask: &[bool], choose: ChoosePositions) -> Vec<usize>;

    /// Which final hidden states of the target the samples need.
    fn final_states(&self) -> FinalStates;

    /// Whether the final hidden state of a sample's last token is trained on, as in Eagle3 with `shifted` supervision.
    fn reads_last_token_state(&self) -> bool;

    /// This sample's contribution to the loss denominator.
    fn loss_denominator_part(&self, loss_mask: &[bool], anchors: &[usize]) -> f64;

    /// Definitions of the drafter's metrics.
    fn metric_defs(&self) -> Metrics;

    /// Floating-point operations of forward and backward pass over `samples`.
    fn flops(&self, samples: &[TrainSample]) -> f64;

    /// Estimated peak bytes of forward and backward pass, without weights and gradients of parameters.
    fn activation_bytes(&self, samples: &[SampleSize], kind: Kind, device: Device) -> usize;

    /// Freezes parameters whose names have one of these prefixes.
    fn freeze(&mut self, prefixes: Vec<&'static str>);

    /// Freezes all parameters and trains LoRA's matrices instead.
    ///
    /// # Errors
    /// The entry of `target_modules` that names no linear layer, with the names that exist.
    fn set_lora(&mut self, lora: LoraRecipe) -> Result<(), String>;

    /// Turns on activation checkpointing of the layers. Returns whether the drafter supports it.
    fn enable_recompute(&mut self) -> bool;

    /// Numbers of parameters, without embedding and LM head.
    fn num_parameters(&self) -> ParamCounts;

    /// Rows of an LM head that the drafter has beside the target's: the tokens of a reduced vocabulary; None without one.
    fn own_head_rows(&self) -> Option<usize> {
        None
    }
}

/// Numbers of parameters of a drafter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ParamCounts {
    /// Number of trainable parameters.
    pub trainable: usize,
    /// Number of frozen parameters.
    pub frozen: usize,
    /// Number of frozen parameters that LoRA updates. A process holds them twice, and a backward pass computes their gradients.
    pub lora_targets: usize,
    /// Number of parameters of the largest weight that LoRA updates.
    pub largest_lora_target: usize,
    /// Whether LoRA's matrices are the trainable parameters. They are merged into the drafter's weights.
    pub has_lora: bool,
}

impl ParamCounts {
    /// Number of weights of the drafter that decodes and that a checkpoint holds, without embedding and LM head.
    pub fn drafter_weights(&self) -> usize {
        if self.has_lora { self.frozen } else { self.trainable + self.frozen }
    }

    /// Bytes that LoRA takes beside weights and gradients for a moment, in a model of dtype `kind`. Before a
    /// pass, when its target weights have no gradients, one of them is merged at a time. Behind the pass, one
    /// gradient at a time becomes float32.
    pub fn lora_working_bytes(&self, kind: Kind) -> u64 {
        let (largest, size) = (self.largest_lora_target as u64, kind.elt_size_in_bytes() as u64);
        let merging = (largest * MERGE_BYTES).saturating_sub(self.lora_targets as u64 * size);
        let gradient = if kind == Kind::Float { 0 } else { largest * 4 };
        merging.max(gradient)
    }
}

/// Defines metrics, which are computed from sums over micro-batches.
pub struct Metrics {
    /// Number of sums.
    pub count: usize,
    /// Metrics that a log line shows after the loss: (short name, key).
    pub headline: &'static [(&'static str, &'static str)],
    /// Computes the metrics of a logging window, among them `loss` and `tau_probabilistic`.
    pub compute: Box<MetricsFn>,
}

/// Computes metrics from (sums, number of sequences).
pub type MetricsFn = dyn Fn(&[f64], usize) -> Map<String, Value>;

/// Called when the gradients of another stage are complete, with the number of complete stages. See [`TrainableDrafter::grad_stages`].
pub type GradReadyHook<'a> = &'a mut dyn FnMut(usize);

/// A drafter that a trainer can train.
pub trait TrainableDrafter {
    /// Runs forward and backward over one micro-batch, and adds to the gradients of the parameters.
    ///
    /// Returns the sums for [`Metrics`], float64, detached, on the drafter's device, or None if no token is supervised.
    ///
    /// `progress` is the share of the run's optimizer steps that were taken before this one, from 0 to below 1, for losses whose weights
    /// change during training. `on_grad_ready` is called for each of the [`grad_stages`](Self::grad_stages) as soon as its gradients are
    /// complete.
    fn accumulate(
        &self,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        progress: f64,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Option<Tensor>;

    /// Prefixes of the parameters whose gradients are complete before the backward pass ends, in order of completion.
    fn grad_stages(&self) -> Vec<String>;

    /// A drafter for `slots` sequences with the present weights.
    fn inference_drafter(&self, slots: usize) -> Box<dyn Drafter>;

    /// Loads the weights of the target's layers that the drafter computes with, from the folder of the target. Most drafters read
    /// states only.
    ///
    /// # Errors
    /// If a tensor is missing or does not fit.
    fn load_target(&self, _dir: &Path) -> Result<(), ModelError> {
        Ok(())
    }

    /// Loads the weights of the drafter checkpoint in `dir`. Heads that the checkpoint lacks stay random: DSpark may start from DFlash.
    /// Returns the names of the random parameters. Embedding and LM head of the target are not replaced.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] with every setting that differs; any other error if `dir` is not a whole checkpoint.
    fn load_pretrained(&self, dir: &Path) -> Result<Vec<String>, ModelError>;

    /// Trained parameters by checkpoint name; they share storage with the model. With LoRA, its float32 matrices.
    fn parameters(&self) -> &[(String, Tensor)];

    /// Frozen weights that LoRA updates, by checkpoint name, sharing storage with the model; empty without LoRA. A checkpoint holds the
    /// sums instead.
    fn lora_base(&self) -> Vec<(String, Tensor)>;

    /// All tensors of a checkpoint: parameters and frozen tensors. LoRA's updates are merged into the weights.
    fn checkpoint(&self) -> Vec<(String, Tensor)>;

    /// Contents of config.json.
    fn config_json(&self) -> Map<String, Value>;
}

/// A drafter for the doctor, which tries other settings with the same weights.
pub trait DrafterProbe {
    /// Layers of the drafter.
    fn layers(&self) -> &[LayerSpec];

    /// Captured target layers.
    fn taps(&self) -> &[Tap];

    /// Whether the config names the captured target layers.
    fn names_taps(&self) -> bool;

    /// Shape of the blocks; None for a drafter without blocks.
    fn block_spec(&self) -> Option<&BlockSpec>;

    /// Token that stands for tokens to predict; None for a drafter without one.
    fn mask_token_id(&self) -> Option<i64>;

    /// Whether the config may set `slots`.
    fn chooses_slots(&self) -> bool;

    /// Whether the drafter may have causal blocks.
    fn may_be_causal(&self) -> bool;

    /// Embedding `[V, d]` and LM head `[V, d]`, or `[Vd, d]` with a reduced vocabulary. None for a drafter that has no copies of the
    /// target's.
    fn embed_and_head(&self) -> Option<(Tensor, Tensor)>;

    /// The target's id of each draft id, `[Vd]` int64; None if the drafter can draft all of the target's tokens.
    fn draft_tokens(&self) -> Option<&Tensor>;

    /// A probe with the same weights and other settings.
    fn with_overrides(&self, reading: &DrafterOverrides) -> Box<dyn DrafterProbe>;

    /// Teacher-forced predictions. Every anchor must have a whole supervised block. None if samples or blocks are too short.
    fn predict(&self, samples: &[TrainSample]) -> Option<Predictions<'_>>;
}

/// Settings of a drafter that a probe overrides.
#[derive(Default)]
pub struct DrafterOverrides<'a> {
    /// Model whose rotary settings are used.
    pub rope_of: Option<&'a ModelConfig>,
    /// Another mask token.
    pub mask_token_id: Option<i64>,
    /// Another convention of the slots.
    pub slots: Option<SlotTarget>,
    /// Whether blocks are causal.
    pub causal: Option<bool>,
    /// Another embedding and LM head, `[V, d]` each.
    pub embed_and_head: Option<(&'a Tensor, &'a Tensor)>,
}

/// Teacher-forced predictions of R rows, sorted by position in the block.
pub struct Predictions<'a> {
    /// Number of rows of each position.
    pub counts: Vec<i64>,
    /// The target's states that predict the same tokens, `[R, d]`.
    pub teacher: Tensor,
    /// `logits(start, len)` computes the drafter's logits of `len` rows from `start`, `[len, V]` float32.
    pub logits: Box<dyn Fn(i64, i64) -> Tensor + 'a>,
    /// Sum of the confidences over all rows; None without a confidence head.
    pub confidence: Option<f64>,
}

/// See [`Proposer::tree_refusal`](deepspec_engine::Proposer::tree_refusal): the reason of drafters that draft autoregressively.
pub(crate) const TREE_REFUSAL: Option<&str> =
    Some("it drafts one token after the other, and every node of a tree would take a pass of the drafter");

/// Samples γ tokens autoregressively. `logits(token)` computes logits `[S, V]` after the last sampled token, or after the anchors if
/// `token` is None.
pub(crate) fn draft_autoregressively(
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lora_takes_more_than_a_pass_if_it_targets_few_weights() {
        let of = |lora_targets, largest_lora_target, kind| {
            let counts = ParamCounts { lora_targets, largest_lora_target, ..ParamCounts::default() };
            counts.lora_working_bytes(kind)
        };
        // Gradients of float32 take less than the sum and its mask.
        assert_eq!(of(100, 100, Kind::Float), 100);
        assert_eq!(of(125, 100, Kind::Float), 0);
        assert_eq!(of(100, 100, Kind::BFloat16), 400);
        assert_eq!(of(0, 0, Kind::BFloat16), 0);
    }
}
