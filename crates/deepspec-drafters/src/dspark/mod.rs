//! DSpark (Markov and confidence heads) and DFlash (neither).

mod config;
mod cost;
mod heads;
mod kind;
pub mod layouts;
mod metrics;
mod model;
mod objective;
mod recipe;

pub use config::{BlockConfig, Confidence};
pub use kind::{BlockObjective, BlockPlan, BlockProposer, DFLASH, DSPARK};
pub use model::Block;
pub use objective::BlockSum;
pub use recipe::{BlockRecipe, ConfidenceRecipe, Markov, MarkovKind};
