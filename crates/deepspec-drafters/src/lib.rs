//! Drafters, a folder each. The programs use them as [`Drafter`], [`DrafterPlan`], [`TrainableDrafter`] and [`DrafterProbe`].
//!
//! A drafter that is trained on hidden states implements [`DrafterKind`] and [`DrafterSettings`]; [`DraftModel`] and [`Plan`] have the
//! parts that all of them share. A line in `registry.rs` registers it.
//!
//! Shapes: N rows (tokens), T context tokens of one sequence, d hidden size, m taps, V vocabulary. H heads, G key/value
//! heads, D head dim, S slots of an engine. A blocks, B slots of a block, γ tokens that it drafts, r Markov rank.

mod block_common;
mod causal;
mod dflash2;
mod draft_model;
mod drafter;
mod dspark;
mod eagle3;
mod registration;
mod registry;
mod sample;
mod spec;
mod train_state;

pub use block_common::{
    BlockBatch, BlockDrafter, BlockProposerOf, BlockSpec, Drafting, LayerType, LossSum, anchor_candidates,
    eval_mask, slot_weight,
};
pub use deepspec_ops::distill_loss::{Dpace, Lk, LkForm, LossRecipe};
pub use dflash2::{
    Convolution, DFLASH2_SUMS, DFlash2, DFlash2Config, DFlash2Objective, DFlash2Plan, DFlash2Proposer,
    DFlash2Recipe, DFlash2Settings, Selector,
};
pub use draft_model::{
    DraftConfig, DraftDecoder, DraftModel, DrafterKind, DrafterSettings, PassRows, Plan, SampleSize,
    WarmStart, is_embed_or_head,
};
pub use drafter::{
    ConfigIssue, Drafter, DrafterOptions, DrafterOverrides, DrafterPlan, DrafterProbe, GradReadyHook,
    Metrics, Predictions, TrainableDrafter, WeightCounts,
};
pub use dspark::{
    BLOCK_SUMS, Block, BlockConfig, BlockObjective, BlockPlan, BlockProposer, BlockRecipe, BlockSettings,
    Confidence, ConfidenceRecipe, Markov, MarkovKind,
};
pub use eagle3::{
    Eagle3, Eagle3Batch, Eagle3Config, Eagle3Objective, Eagle3Plan, Eagle3Proposer, Eagle3Recipe,
    Eagle3Settings, Supervise, metrics as eagle3_metrics,
};
pub use registry::{
    check_layout, is_language_model, load, load_recipe, load_saved_recipe, open_checkpoint, plan,
    recipe_schema, title,
};
pub use sample::{LossDenominator, TrainSample};
pub use spec::{DrafterSpec, Recipe};
pub use train_state::{TRAIN_STATE, trained_thinking};
