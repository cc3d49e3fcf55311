//! Eagle3: an autoregressive drafter that is trained on its own outputs (training-time test).
//!
//! Position i pairs the state of token i with the embedding of token i + 1 and predicts token i + 2. In step s of the
//! training-time test the drafter's own output of step s − 1 replaces the state. The token is then i + 1 + s.

mod batch;
mod formats;
mod model;
mod train;

pub use batch::Eagle3Batch;
pub use model::{
    Eagle3, Eagle3Config, Eagle3Objective, Eagle3Proposer, Eagle3Recipe, Eagle3Settings, Supervise,
};
pub use train::{EAGLE3_INFO, Eagle3Plan, build_plan, metric_defs, read_recipe};
