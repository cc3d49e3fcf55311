//! Eagle3: an autoregressive drafter that is trained on its own outputs (training-time test).
//!
//! Column i pairs the state of token i with the embedding of token i + 1 and predicts token i + 2. In step s of the
//! training-time test the drafter's own output of step s − 1 takes the state's place, and the token is i + 1 + s.

mod batch;
mod config;
mod cost;
mod kind;
mod layouts;
mod metrics;
mod model;
mod objective;
mod proposer;
mod recipe;

pub use batch::Eagle3Batch;
pub use config::Eagle3Config;
pub use kind::{Eagle3Plan, KIND};
pub use metrics::Eagle3Metrics;
pub use model::Eagle3;
pub use proposer::Eagle3Proposer;
pub use recipe::{Eagle3Objective, Eagle3Recipe, Supervise};
