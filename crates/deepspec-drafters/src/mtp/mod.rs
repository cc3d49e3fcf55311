//! MTP-1: one layer that drafts one token after the other from the target's final state and its own output.
//!
//! Position t pairs the state of token t with the embedding of token t + 1 and predicts token t + 2. In step j of training the
//! drafter's own output of step j − 1 replaces the state. The token is then t + 1 + j.

mod formats;
mod model;
mod native;
mod train;

pub use model::{Mtp, MtpConfig, MtpProposer, MtpRecipe, MtpSettings};
pub use native::{extract_mtp, merge};
pub use train::{MTP_INFO, MtpPlan, build_plan, read_recipe};
