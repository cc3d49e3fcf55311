//! DSpark and DFlash as kinds of drafters.

use deepspec_core::FinalStates;
use deepspec_core::config::ConfigError;
use deepspec_core::recipe::Recipe;
use deepspec_models::ModelConfig;
use deepspec_models::nn::Builder;
use deepspec_ops::distill_loss::LossRecipe;
use serde_json::{Value, json};
use tch::{Device, Tensor};

use super::config::{BlockConfig, Confidence};
use super::metrics::BlockMetrics;
use super::model::{Block, BlockParts};
use super::recipe::BlockRecipe;
use crate::block_common::{self, AnchoredProposer, BlockSpec, anchor_candidates, block_weight};
use crate::draft_model::{
    DraftDecoder, DrafterConfig, DrafterKind, PassBytes, Plan, SampleSize, check, load,
};
use crate::registration::{Checkpoints, DrafterKindInfo, ParamGroup, RecipeSettings, Section, classes};
use crate::{
    ConfigIssue, Drafter, DrafterPlan, GradReadyHook, LossDenominator, Metrics, Predictions, Settings,
    TrainSample,
};

/// The heads, and all that stands before them.
const PARTS: &[ParamGroup] = &[
    block_common::BACKBONE,
    ParamGroup { name: "markov", prefixes: &["markov_head."] },
    ParamGroup { name: "confidence", prefixes: &["confidence_head."] },
];

/// Parallel block drafter with sequential heads.
pub const DSPARK: DrafterKindInfo = DrafterKindInfo {
    name: "dspark",
    title: "DSpark",
    parts: PARTS,
    settings: Some(RecipeSettings {
        read: |section| Ok(Box::new(BlockSettings::check(section, section.read()?, (0.1, 0.9))?)),
        schema: |schemas| schemas.subschema_for::<BlockRecipe>(),
    }),
    checkpoints: Some(Checkpoints {
        classes: || classes(BlockConfig::CLASS),
        hold: "a block drafter (DSpark, DFlash)",
        are_language_models: false,
        check: check::<BlockParts>,
        load: load::<BlockParts>,
        layouts: Some(&super::layouts::READER),
    }),
};

/// The same without heads, trained with cross entropy. Its checkpoints are DSpark's.
pub const DFLASH: DrafterKindInfo = DrafterKindInfo {
    name: "dflash",
    title: "DFlash",
    parts: PARTS,
    settings: Some(RecipeSettings {
        read: |section| {
            let recipe: BlockRecipe = section.read()?;
            if recipe.markov.is_some() || recipe.confidence.is_some() {
                return Err(section.error("", "DFlash has no Markov and no confidence head; use `dspark`"));
            }
            Ok(Box::new(BlockSettings::check(section, recipe, (1.0, 0.0))?))
        },
        schema: |schemas| schemas.subschema_for::<BlockRecipe>(),
    }),
    checkpoints: None,
};

/// A block drafter's settings.
struct BlockSettings {
    recipe: BlockRecipe,
    loss: LossRecipe,
}

impl BlockSettings {
    /// Checks them; the α of cross entropy and L1 hold where no loss is given.
    fn check(
        section: &Section,
        recipe: BlockRecipe,
        (ce_alpha, l1_alpha): (f64, f64),
    ) -> Result<Self, ConfigError> {
        let loss = recipe.loss.unwrap_or(LossRecipe { ce_alpha, l1_alpha, ..LossRecipe::NONE });
        let wrong = |(key, problem): (&str, String)| section.error(key, problem);
        recipe.check().and_then(|()| loss.check()).map_err(wrong)?;
        Ok(Self { recipe, loss })
    }
}

impl Settings for BlockSettings {
    fn to_json(&self) -> Value {
        json!(self.recipe)
    }

    fn fit(&self, recipe: &Recipe, target: &ModelConfig) -> Result<Box<dyn DrafterPlan>, ConfigIssue> {
        let Self { recipe: block, loss } = self;
        let config = BlockConfig {
            decoder: DraftDecoder::behind_anchors(target, recipe, block.layers().windows())?,
            blocks: BlockSpec {
                block_size: block.block_size,
                slots: block.slots,
                mask_token_id: block.mask_token_id,
                num_anchors: block.num_anchors,
            },
            markov: block.markov,
            confidence: block.confidence.map(|head| Confidence { with_markov: head.with_markov }),
        };
        config.validate().map_err(|(key, problem)| match key {
            "num_hidden_layers" => ("num_draft_layers", problem),
            "markov_rank" => ("markov.rank", problem),
            "confidence_head_with_markov" => ("confidence.with_markov", problem),
            other => (other, problem),
        })?;
        let confidence_alpha = block.confidence.map_or(0.0, |head| head.alpha);
        let objective = BlockObjective { loss: *loss, confidence_alpha };
        Ok(Box::new(BlockPlan::new(config, objective)))
    }
}

/// A block drafter with context histories.
pub type BlockProposer = AnchoredProposer<BlockParts>;

/// A block drafter before any weight is there.
pub type BlockPlan = Plan<BlockParts>;

/// How a block drafter is trained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockObjective {
    /// Weights of the losses and of positions.
    pub loss: LossRecipe,
    /// Weight of the confidence head's binary cross entropy.
    pub confidence_alpha: f64,
}

impl DrafterKind for BlockParts {
    type Config = BlockConfig;
    type Objective = BlockObjective;
    const FINAL_STATES: FinalStates = FinalStates::Supervised;
    const RECOMPUTES: bool = true;

    fn new(b: &Builder, config: &BlockConfig) -> Self {
        Self::build(b, config)
    }

    fn anchors(
        plan: &BlockPlan,
        loss_mask: &[bool],
        choose: &mut dyn FnMut(&[usize], usize) -> Vec<usize>,
    ) -> Vec<usize> {
        choose(&anchor_candidates(loss_mask), plan.config.blocks.num_anchors)
    }

    fn loss_weight(plan: &BlockPlan, loss_mask: &[bool], anchors: &[usize]) -> f64 {
        block_weight(&plan.config.blocks, plan.objective.loss.decay_gamma, loss_mask, anchors)
    }

    fn accumulate(
        model: &Block,
        objective: &BlockObjective,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        listener: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        let (device, kind) = (model.device(), model.kind());
        let batch = model.config().batch(samples, objective.loss.decay_gamma, device, kind)?;
        Some(model.accumulate(&batch, objective, normaliser, listener))
    }

    fn stages(model: &Block) -> Vec<String> {
        model.layer_stages()
    }

    fn metrics(plan: &BlockPlan) -> Box<dyn Metrics> {
        Box::new(BlockMetrics::new(plan.objective.loss, plan.config.blocks.drafted()))
    }

    fn flops(plan: &BlockPlan, samples: &[TrainSample]) -> f64 {
        plan.config.flops(samples)
    }

    fn pass_bytes(
        config: &BlockConfig,
        samples: &[SampleSize],
        kind: tch::Kind,
        device: Device,
    ) -> PassBytes {
        config.pass_bytes(samples, kind.elt_size_in_bytes(), device)
    }

    fn product_shapes(config: &BlockConfig) -> usize {
        config.product_shapes()
    }

    fn drafter(model: Block, slots: usize) -> Box<dyn Drafter> {
        Box::new(AnchoredProposer::new(model, slots))
    }

    fn predict<'a>(model: &'a Block, samples: &[TrainSample]) -> Option<Predictions<'a>> {
        block_common::predict(model, samples)
    }
}
