//! DFlash 2 as a kind of drafter.

use deepspec_core::recipe::Recipe;
use deepspec_core::{FinalStates, Slots};
use deepspec_models::ModelConfig;
use deepspec_models::nn::Builder;
use deepspec_ops::distill_loss::LossRecipe;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::config::DFlash2Config;
use super::metrics::DFlash2Metrics;
use super::model::{DFlash2, DFlash2Parts};
use super::recipe::DFlash2Recipe;
use crate::block_common::{self, AnchoredProposer, BlockBatch, BlockSpec, anchor_candidates, block_weight};
use crate::draft_model::{
    DraftDecoder, DrafterConfig, DrafterKind, PassBytes, Plan, SampleSize, check, load,
};
use crate::registration::{Checkpoints, DrafterKindInfo, ParamGroup, RecipeSettings, classes};
use crate::{
    ConfigIssue, Drafter, DrafterPlan, GradReadyHook, LossDenominator, Metrics, Predictions, Settings,
    TrainSample,
};

/// Parallel block drafter with convolutions and a path selector.
pub const KIND: DrafterKindInfo = DrafterKindInfo {
    name: "dflash2",
    title: "DFlash 2",
    parts: &[block_common::BACKBONE, ParamGroup { name: "selector", prefixes: &["candidate_selector."] }],
    settings: Some(RecipeSettings {
        read: |section| {
            let recipe: DFlash2Recipe = section.read()?;
            let checked = recipe.check().and_then(|()| recipe.loss().check());
            checked.map_err(|(key, problem)| section.error(key, problem))?;
            Ok(Box::new(recipe))
        },
        schema: |schemas| schemas.subschema_for::<DFlash2Recipe>(),
    }),
    checkpoints: Some(Checkpoints {
        classes: || classes(DFlash2Config::CLASS),
        hold: "DFlash 2",
        are_language_models: false,
        check: check::<DFlash2Parts>,
        load: load::<DFlash2Parts>,
        layouts: Some(&super::layouts::READER),
    }),
};

/// A DFlash 2 drafter with context histories.
pub type DFlash2Proposer = AnchoredProposer<DFlash2Parts>;

/// A DFlash 2 drafter before any weight is there.
pub type DFlash2Plan = Plan<DFlash2Parts>;

/// How a DFlash 2 drafter is trained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DFlash2Objective {
    /// Weights of the losses of all logits, and of positions.
    pub loss: LossRecipe,
    /// Weight of the selector's loss.
    pub selector_alpha: f64,
}

impl Settings for DFlash2Recipe {
    fn to_json(&self) -> Value {
        json!(self)
    }

    fn fit(&self, recipe: &Recipe, target: &ModelConfig) -> Result<Box<dyn DrafterPlan>, ConfigIssue> {
        let config = DFlash2Config {
            decoder: DraftDecoder::behind_anchors(target, recipe, self.layers().windows())?,
            blocks: BlockSpec {
                block_size: self.block_size,
                slots: Slots::FillIn,
                mask_token_id: self.mask_token_id,
                num_anchors: self.num_anchors,
            },
            convolution: self.convolution,
            selector_rank: self.selector.rank,
            selector_top_k: self.selector.top_k,
        };
        config.validate().map_err(|(key, problem)| match key {
            "num_hidden_layers" => ("num_draft_layers", problem),
            "conv_kernel_size" => ("convolution.kernel_size", problem),
            "conv_group_size" => ("convolution.group_size", problem),
            "selector_rank" => ("selector.rank", problem),
            "selector_top_k" => ("selector.top_k", problem),
            other => (other, problem),
        })?;
        let objective = DFlash2Objective { loss: self.loss(), selector_alpha: self.selector.alpha };
        Ok(Box::new(DFlash2Plan::new(config, objective)))
    }
}

impl DrafterKind for DFlash2Parts {
    type Config = DFlash2Config;
    type Objective = DFlash2Objective;
    const FINAL_STATES: FinalStates = FinalStates::Supervised;
    const RECOMPUTES: bool = true;

    fn new(b: &Builder, config: &DFlash2Config) -> Self {
        Self::build(b, config)
    }

    fn anchors(
        plan: &DFlash2Plan,
        loss_mask: &[bool],
        choose: &mut dyn FnMut(&[usize], usize) -> Vec<usize>,
    ) -> Vec<usize> {
        choose(&anchor_candidates(loss_mask), plan.config.blocks.num_anchors)
    }

    fn loss_weight(plan: &DFlash2Plan, loss_mask: &[bool], anchors: &[usize]) -> f64 {
        block_weight(&plan.config.blocks, plan.objective.loss.decay_gamma, loss_mask, anchors)
    }

    fn accumulate(
        model: &DFlash2,
        objective: &DFlash2Objective,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        listener: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        let DFlash2Objective { loss, selector_alpha } = objective;
        let batch = model.config().batch(samples, loss.decay_gamma, model.device(), model.kind())?;
        Some(model.accumulate(&batch, loss, *selector_alpha, normaliser, listener))
    }

    fn stages(model: &DFlash2) -> Vec<String> {
        model.layer_stages()
    }

    fn metrics(plan: &DFlash2Plan) -> Box<dyn Metrics> {
        Box::new(DFlash2Metrics { loss: plan.objective.loss, gamma: plan.config.blocks.drafted() })
    }

    fn flops(plan: &DFlash2Plan, samples: &[TrainSample]) -> f64 {
        plan.config.flops(samples)
    }

    fn pass_bytes(config: &DFlash2Config, samples: &[SampleSize], kind: Kind, device: Device) -> PassBytes {
        config.pass_bytes(samples, kind.elt_size_in_bytes(), device)
    }

    fn product_shapes(config: &DFlash2Config) -> usize {
        config.product_shapes()
    }

    fn drafter(model: DFlash2, slots: usize) -> Box<dyn Drafter> {
        Box::new(AnchoredProposer::new(model, slots))
    }

    fn predict<'a>(model: &'a DFlash2, samples: &[TrainSample]) -> Option<Predictions<'a>> {
        block_common::predict(model, samples)
    }
}

impl DFlash2Config {
    /// The tensors of one pass over samples; see [`BlockBatch::new`].
    pub fn batch(
        &self,
        samples: &[TrainSample],
        decay_gamma: f64,
        device: Device,
        kind: Kind,
    ) -> Option<BlockBatch> {
        BlockBatch::new(samples, &self.blocks, true, decay_gamma, device, kind)
    }
}
