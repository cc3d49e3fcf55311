//! Drafters, one folder per kind. The programs use them through [`Drafter`], [`DrafterPlan`], [`TrainableDrafter`] and [`DrafterProbe`].
//!
//! A kind that is trained on hidden states implements [`DrafterKind`] and [`DrafterSettings`]. [`DraftModel`] and [`Plan`] are the common
//! parts of these kinds. A line in `registry.rs` registers a kind.
//!
//! Shapes: N rows (tokens), T context tokens of one sequence, d hidden size, m taps, V vocabulary. H heads, G key/value
//! heads, D head dim, S slots of an engine. A blocks, B slots of a block, γ tokens that it drafts, r Markov rank.

mod assistant;
mod block_common;
mod causal;
mod dflash2;
mod domino;
mod draft_model;
mod drafter;
mod dspark;
mod dspark_v4;
mod eagle3;
mod engine_rules;
mod mtp;
mod peagle;
mod registration;
mod registry;
mod sample;
mod spec;
mod token_common;
mod train_state;
mod xpress;

pub use assistant::{Assistant, AssistantProposer, AssistantRecipe};
pub use block_common::{
    BackboneDrafter, BlockBatch, BlockDrafter, BlockProposerOf, BlockSpec, ConfidenceInputs, Convolution,
    LayerType, LossSum, anchor_candidates, slot_weight, supervised_draft_count,
};
pub use deepspec_ops::distill_loss::{BlockVerification, Dpace, Lk, LkForm, LossRecipe};
pub use dflash2::{
    DFLASH2_SUMS, DFlash2, DFlash2Config, DFlash2Objective, DFlash2Plan, DFlash2Proposer, DFlash2Recipe,
    DFlash2Settings, Selector,
};
pub use domino::{
    DOMINO_SUMS, Domino, DominoConfig, DominoObjective, DominoPlan, DominoProposer, DominoRecipe,
    DominoSettings, GruSettings, LambdaBase,
};
pub use draft_model::{
    DraftConfig, DraftDecoder, DraftModel, DrafterKind, DrafterSettings, LoraAdapters, PassRows, Plan,
    SampleSize, WarmStartCheck, is_embed_or_head,
};
pub use drafter::{
    ChoosePositions, ConfigIssue, Drafter, DrafterOptions, DrafterOverrides, DrafterPlan, DrafterProbe,
    GradReadyHook, Metrics, ParamCounts, Predictions, TrainableDrafter,
};
pub use dspark::{
    ConfidenceRecipe, ConfidenceSettings, DSPARK_SUMS, DSpark, DSparkConfig, DSparkObjective, DSparkPlan,
    DSparkProposer, DSparkRecipe, DSparkSettings, MarkovKind, MarkovSettings,
};
pub use dspark_v4::{
    DSparkV4, DSparkV4Config, DSparkV4Plan, DSparkV4Proposer, DSparkV4Recipe, DSparkV4Settings, StageSettings,
};
pub use eagle3::{
    Eagle3, Eagle3Batch, Eagle3Config, Eagle3Objective, Eagle3Plan, Eagle3Proposer, Eagle3Recipe,
    Eagle3Settings, Supervise, metric_defs as eagle3_metric_defs,
};
pub use engine_rules::{EngineRule, engine_rules};
pub use mtp::{Mtp, MtpConfig, MtpPlan, MtpProposer, MtpRecipe, MtpSettings, extract_mtp};
pub use peagle::{
    DownSampling, PEagle, PEagleBatch, PEagleConfig, PEagleObjective, PEaglePlan, PEagleProposer,
    PEagleRecipe, PEagleSettings,
};
pub use registry::{
    check_layout, drafter_title, is_language_model, load_drafter, load_recipe, load_saved_recipe, merge_mtp,
    open_checkpoint, plan_drafter, recipe_schema, tree_refusal,
};
pub use sample::{LossDenominator, TrainSample};
pub use spec::{DrafterSpec, Recipe};
pub use token_common::{Eagle3Norms, StepBatch, StepObjective};
pub use train_state::{TRAIN_STATE_FILE, trained_with_thinking};
pub use xpress::{
    Consistency, RefinerRecipe, XPRESS_SUMS, XPress, XPressBackbone, XPressConfig, XPressObjective,
    XPressPlan, XPressProposer, XPressRecipe, XPressSettings,
};
