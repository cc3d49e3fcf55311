//! The block drafter: DSpark (Markov and confidence heads) and DFlash (neither).
//!
//! γ inputs `[anchor, mask, …, mask]` give γ predictions: slot k predicts the token at anchor + 1 + k.

mod batch;
mod config;
mod cost;
mod examined;
mod heads;
mod kind;
mod metrics;
mod model;
mod objective;
mod proposer;
mod recipe;
mod token_sums;

pub use batch::{BlockBatch, anchor_candidates, eval_mask, slot_weight};
pub use config::{BlockConfig, Confidence};
pub use kind::{BlockObjective, BlockPlan, DFLASH, DSPARK};
pub use model::Block;
pub use objective::BlockSum;
pub use proposer::{BlockProposer, Drafting};
pub use recipe::{BlockRecipe, ConfidenceRecipe, LayerType, Markov, MarkovKind};
