//! The block drafter: DSpark (Markov and confidence heads) and DFlash (neither).
//!
//! γ inputs `[anchor, mask, …, mask]` give γ predictions: slot k predicts the token at anchor + 1 + k.

mod batch;
mod config;
mod cost;
mod heads;
mod metrics;
mod model;
mod objective;
mod proposer;
mod token_sums;

pub use batch::{BlockBatch, TrainSample, anchor_candidates, eval_mask, slot_weight};
pub use config::{BlockConfig, Confidence};
pub use metrics::BlockTerms;
pub use model::Block;
pub use objective::{LossSums, Normaliser};
pub use proposer::{BlockProposer, Drafting};
