//! Drafters that learn: all that a trainer knows of them.

use deepspec_core::cli::UsageError;
use deepspec_core::recipe::{DrafterRecipe, Markov, Recipe};
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use super::Drafter;
use super::block::{
    Block, BlockBatch, BlockConfig, BlockTerms, Confidence, Normaliser, TrainSample, anchor_candidates,
    eval_mask, slot_weight,
};
use super::cost::{self, PassBytes, SampleSize};
use super::eagle3::{Eagle3, Eagle3Batch, Eagle3Config, Eagle3Objective, Eagle3Terms};
use crate::config::MAX_LAYERS;
use crate::losses::LossAlphas;
use crate::{BlockProposer, Eagle3Proposer, ModelConfig, ModelError};

/// What a recipe asks for, fitted to a target: architecture and objective of a drafter, before any weight is there.
#[derive(Debug, Clone)]
pub enum Design {
    /// DSpark or DFlash.
    Block {
        /// The architecture.
        config: BlockConfig,
        /// Weights of the losses.
        alphas: LossAlphas,
        /// Slot k of a block weighs exp(−k / this).
        decay_gamma: f64,
    },
    /// Eagle3.
    Eagle3 {
        /// The architecture.
        config: Eagle3Config,
        /// How it is trained.
        objective: Eagle3Objective,
    },
}

impl Design {
    /// The drafter of `recipe` for this target.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] naming the key that does not fit.
    pub fn new(recipe: &Recipe, target: &ModelConfig) -> Result<Self, ModelError> {
        let misfit = |(key, problem)| ModelError::Mismatch(UsageError(format!("{key}: {problem}")));
        match &recipe.drafter {
            DrafterRecipe::Eagle3(eagle3) => {
                let config = Eagle3Config {
                    model: target.draft_decoder(&vec![None; eagle3.num_draft_layers.min(MAX_LAYERS + 1)])?,
                    target_layer_ids: recipe.taps(),
                    num_target_layers: target.layers.len(),
                    ttt_length: eagle3.ttt_length,
                    step_loss_decay: eagle3.step_loss_decay,
                };
                config.validate().map_err(misfit)?;
                let objective = Eagle3Objective {
                    supervise: eagle3.supervise,
                    step_loss_decay: eagle3.step_loss_decay,
                    normalization: recipe.train.loss_normalization,
                };
                Ok(Self::Eagle3 { config, objective })
            }
            DrafterRecipe::Dspark(block) | DrafterRecipe::Dflash(block) => {
                let loss = recipe.drafter.block_loss(block);
                let confidence = block.confidence;
                let config = BlockConfig {
                    model: target.draft_decoder(&block.windows().take(MAX_LAYERS + 1).collect::<Vec<_>>())?,
                    block_size: block.block_size,
                    mask_token_id: block.mask_token_id,
                    target_layer_ids: recipe.taps(),
                    num_target_layers: target.layers.len(),
                    num_anchors: block.num_anchors,
                    markov: block.markov,
                    confidence: confidence.map(|head| Confidence { with_markov: head.with_markov }),
                };
                config.validate().map_err(misfit)?;
                let alphas = LossAlphas::new(&loss, confidence.map_or(0.0, |head| head.alpha));
                Ok(Self::Block { config, alphas, decay_gamma: loss.decay_gamma })
            }
        }
    }

    /// A drafter of the same parts at sizes whose weights and states count for nothing, and its model's sizes.
    pub fn smallest(&self) -> (Self, ModelConfig) {
        let mut design = self.clone();
        let model = match &mut design {
            Self::Eagle3 { config, .. } => &mut config.model,
            Self::Block { config, .. } => {
                config.mask_token_id = 0;
                config.num_anchors = 1;
                config.markov = config.markov.map(|markov| Markov { rank: 8, ..markov });
                &mut config.model
            }
        };
        (model.hidden_size, model.vocab_size) = (64, 64);
        for layer in &mut model.layers {
            (layer.hidden_size, layer.intermediate_size) = (64, 64);
            // Rotations and scales are those of the head's own width.
            let heads = &mut layer.attention.heads;
            (heads.query, heads.key_value) = (2, 1);
        }
        let model = model.clone();
        (design, model)
    }

    /// A fresh drafter with the target's embedding and head (both `[V, d]`, shared and frozen), on their device.
    ///
    /// # Errors
    /// None for fresh weights; the signature is shared with loading.
    pub fn build(
        &self,
        embed_tokens: &Tensor,
        lm_head: &Tensor,
        seed: u64,
        kind: Kind,
    ) -> Result<Learner, ModelError> {
        match self {
            Self::Block { config, alphas, decay_gamma } => Ok(Learner::Block {
                block: Box::new(Block::fresh(config.clone(), embed_tokens, lm_head, seed, kind)?),
                alphas: *alphas,
                decay_gamma: *decay_gamma,
            }),
            Self::Eagle3 { config, objective } => Ok(Learner::Eagle3 {
                model: Box::new(Eagle3::fresh(config.clone(), embed_tokens, lm_head, seed, kind)?),
                objective: *objective,
            }),
        }
    }

    /// What of a sample it trains on.
    pub fn supervision(&self) -> Supervision {
        match self {
            Self::Block { config, decay_gamma, .. } => Supervision::Blocks {
                num_anchors: config.num_anchors,
                block_size: config.block_size,
                decay_gamma: *decay_gamma,
            },
            Self::Eagle3 { .. } => Supervision::Sequence,
        }
    }

    /// Floating-point operations of forward and backward over `samples`.
    pub fn flops(&self, samples: &[TrainSample]) -> f64 {
        match self {
            Self::Block { config, .. } => config.flops(samples),
            Self::Eagle3 { config, objective } => config.flops(samples, objective.supervise),
        }
    }

    /// What forward and backward over samples of these sizes hold at most beside weights and gradients of this kind.
    pub fn pass_bytes(&self, samples: &[SampleSize], kind: Kind, device: Device) -> PassBytes {
        match self {
            Self::Block { config, .. } => config.pass_bytes(samples, kind.elt_size_in_bytes(), device),
            Self::Eagle3 { config, .. } => config.pass_bytes(samples, kind.elt_size_in_bytes()),
        }
    }

    /// What the code that is compiled for passes over micro-batches of one size takes, in weights of this kind.
    pub fn code_bytes(&self, kind: Kind, device: Device) -> usize {
        let shapes = match self {
            Self::Block { config, .. } => config.product_shapes(),
            Self::Eagle3 { config, .. } => config.product_shapes(),
        };
        cost::code_bytes(shapes, kind, device)
    }

    /// Number of trainable weights.
    ///
    /// # Errors
    /// None; the signature is shared with loading.
    pub fn weights(&self) -> Result<usize, ModelError> {
        let parameters = match self {
            Self::Block { config, .. } => Block::outline(config.clone())?,
            Self::Eagle3 { config, .. } => Eagle3::outline(config.clone())?,
        };
        Ok(parameters.iter().map(|(_, tensor)| tensor.numel()).sum())
    }

    /// What the sums of its micro-batches mean.
    pub fn terms(&self) -> Terms {
        match self {
            Self::Block { config, alphas, .. } => Terms::Block(BlockTerms::new(*alphas, config.block_size)),
            Self::Eagle3 { config, objective } => {
                Terms::Eagle3(Eagle3Terms::new(config.ttt_length, objective.step_loss_decay))
            }
        }
    }
}

/// What of a sample is trained on. It depends on the sample's loss mask alone, so that the denominator of an optimiser step is
/// known before any forward.
#[derive(Debug, Clone, Copy)]
pub enum Supervision {
    /// Blocks behind anchors.
    Blocks {
        /// Anchors per sample and epoch.
        num_anchors: usize,
        /// γ.
        block_size: usize,
        /// Slot k weighs exp(−k / this).
        decay_gamma: f64,
    },
    /// The whole sequence, which counts as one however long it is.
    Sequence,
}

impl Supervision {
    /// The sample's anchors, in order; `choose(candidates, count)` draws at most `count` of them.
    pub fn anchors(
        &self,
        loss_mask: &[bool],
        choose: impl FnOnce(&[usize], usize) -> Vec<usize>,
    ) -> Vec<usize> {
        match self {
            Self::Blocks { num_anchors, .. } => choose(&anchor_candidates(loss_mask), *num_anchors),
            Self::Sequence => vec![],
        }
    }

    /// What the sample adds to the denominator of the loss.
    pub fn weight(&self, loss_mask: &[bool], anchors: &[usize]) -> f64 {
        match *self {
            Self::Blocks { block_size, decay_gamma, .. } => anchors
                .iter()
                .flat_map(|&anchor| 0..eval_mask(loss_mask, anchor, block_size))
                .map(|k| f64::from(slot_weight(k, decay_gamma)))
                .sum(),
            Self::Sequence => 1.0,
        }
    }
}

/// What the sums of a drafter's micro-batches mean.
#[derive(Debug, Clone)]
pub enum Terms {
    /// Of DSpark and DFlash.
    Block(BlockTerms),
    /// Of Eagle3.
    Eagle3(Eagle3Terms),
}

impl Terms {
    /// How many sums there are.
    pub fn count(&self) -> usize {
        match self {
            Self::Block(terms) => terms.count(),
            Self::Eagle3(terms) => terms.count(),
        }
    }

    /// Metric keys shown beside the loss, under these short names.
    pub fn headline(&self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Block(terms) => terms.headline(),
            Self::Eagle3(terms) => terms.headline(),
        }
    }

    /// The metrics of a window over `samples` sequences, the total `loss` and `tau_probabilistic` among them.
    pub fn metrics(&self, sums: &[f64], samples: usize) -> Map<String, Value> {
        match self {
            Self::Block(terms) => terms.metrics(sums, samples),
            Self::Eagle3(terms) => terms.metrics(sums),
        }
    }
}

/// A drafter with its objective.
pub enum Learner {
    /// DSpark or DFlash.
    Block {
        /// The model.
        block: Box<Block>,
        /// Weights of the losses.
        alphas: LossAlphas,
        /// Slot k of a block weighs exp(−k / this).
        decay_gamma: f64,
    },
    /// Eagle3.
    Eagle3 {
        /// The model.
        model: Box<Eagle3>,
        /// How it is trained.
        objective: Eagle3Objective,
    },
}

impl Learner {
    /// Forward and backward of one micro-batch: gradients are added to those of the parameters. Gives the sums that the
    /// design's [`Terms`] explain, float64, detached, on the learner's device; they add over micro-batches and ranks. None
    /// where they have nothing to add.
    pub fn accumulate(&self, samples: &[TrainSample], normaliser: Normaliser) -> Option<Tensor> {
        match self {
            Self::Block { block, alphas, decay_gamma } => {
                let batch =
                    BlockBatch::new(samples, block.config(), *decay_gamma, block.device(), block.kind())?;
                Some(block.accumulate(&batch, alphas, normaliser))
            }
            Self::Eagle3 { model, objective } => {
                let steps = model.config().ttt_length;
                let batch = Eagle3Batch::new(samples, objective, steps, model.device(), model.kind());
                Some(model.accumulate(batch.as_ref(), objective, normaliser, samples.len()))
            }
        }
    }

    /// A drafter for `slots` sequences with the weights as they are and as they become: it shares their storage.
    ///
    /// # Errors
    /// None; the signature is shared with loading.
    pub fn drafter(&self, slots: usize) -> Result<Drafter, ModelError> {
        match self {
            Self::Block { block, .. } => Ok(Drafter::Block(BlockProposer::new(block.share()?, slots))),
            Self::Eagle3 { model, .. } => Ok(Drafter::Eagle3(Eagle3Proposer::new(model.share()?, slots))),
        }
    }

    /// Trainable parameters by checkpoint name, sharing storage with the model.
    pub fn parameters(&self) -> &[(String, Tensor)] {
        match self {
            Self::Block { block, .. } => block.parameters(),
            Self::Eagle3 { model, .. } => model.parameters(),
        }
    }

    /// Everything a checkpoint holds: the parameters and what is frozen.
    pub fn checkpoint(&self) -> Vec<(String, Tensor)> {
        match self {
            Self::Block { block, .. } => block.checkpoint(),
            Self::Eagle3 { model, .. } => model.checkpoint(),
        }
    }

    /// The checkpoint's config.json.
    pub fn config_json(&self) -> Map<String, Value> {
        match self {
            Self::Block { block, .. } => block.config().to_json(),
            Self::Eagle3 { model, .. } => model.config().to_json(),
        }
    }

    /// Where it lives.
    pub fn device(&self) -> Device {
        match self {
            Self::Block { block, .. } => block.device(),
            Self::Eagle3 { model, .. } => model.device(),
        }
    }

    /// Kind of weights and activations.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Block { block, .. } => block.kind(),
            Self::Eagle3 { model, .. } => model.kind(),
        }
    }
}
