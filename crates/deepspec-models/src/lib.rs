//! Targets, drafters and losses on libtorch.
//!
//! Legend: N rows (tokens), T context tokens of one sequence, d hidden size, m taps, V vocabulary, H heads, G key/value heads,
//! D head dim, S slots, γ block size, r Markov rank.

mod config;
mod drafters;
mod error;
mod families;
mod identity;
mod kv;
mod losses;
mod nn;
mod room;
mod target;
mod weights;

pub use config::ModelConfig;
pub use deepspec_dialects::MAX_SHARD_BYTES;
pub use drafters::block::{
    Block, BlockBatch, BlockConfig, BlockProposer, BlockTerms, Confidence, Drafting, LossSums, Normaliser,
    TrainSample, anchor_candidates, eval_mask, slot_weight,
};
pub use drafters::causal::CausalProposer;
pub use drafters::cost::{PassBytes, SampleSize};
pub use drafters::eagle3::{Eagle3, Eagle3Batch, Eagle3Config, Eagle3Objective, Eagle3Proposer, Eagle3Terms};
pub use drafters::learner::{Design, Learner, Supervision, Terms};
pub use drafters::{Drafter, DrafterOptions, TrainedConfig};
pub use error::ModelError;
pub use families::Family;
pub use identity::{config_digest, stop_ids, weights_digest};
pub use losses::LossAlphas;
pub use room::{Fit, fit, room};
pub use target::{TargetModel, TargetOptions, load_ends};
pub use weights::{Weights, save, save_checkpoint};
