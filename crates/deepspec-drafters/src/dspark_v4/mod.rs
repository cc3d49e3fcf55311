//! DSpark of DeepSeek-V4: stages of latent attention and a mixture of experts, with hyper-connections in place of residual sums.
//!
//! Further symbols: D head dim and width of a latent, R low ranks of queries and output, G groups of the output, W window, E experts, m
//! residual streams.

mod attention;
mod experts;
mod formats;
mod gguf;
mod hyper_connections;
mod model;
mod proposer;
mod released;
mod settings;
mod train;

pub use model::DSparkV4;
pub use proposer::DSparkV4Proposer;
pub use released::merge;
pub use settings::{DSparkV4Config, DSparkV4Recipe, DSparkV4Settings, StageSettings};
pub use train::{DSPARK_V4_INFO, DSparkV4Plan, build_plan, read_recipe};
