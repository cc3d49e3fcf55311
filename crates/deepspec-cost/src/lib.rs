//! Numeric models without tensors: confidence reliability, calibration, verification scheduling,
//! and [`estimate`]s of whole pipelines.
//!
//! A drafter proposes up to γ tokens per request and a *confidence* c_k for each. This confidence
//! is the probability that the target accepts token k given that it accepted the earlier ones. The
//! running product of the confidences is the *survival* a_k = Π_{i≤k} c_i, the probability that the
//! prefix up to k is accepted (docs/architecture.md, Reliability). The modules answer three
//! questions:
//!
//! - [`reliability`]: is a_k calibrated? ECE, AUROC and Brier score per position.
//! - [`calibrate`]: which temperatures t_k calibrate it? Sequential temperature scaling (STS).
//! - [`scheduler`]: how many tokens of each proposal are worth verifying, given the cost of a
//!   larger batch ([`curve`])?
//!
//! An engine asks a [`planner`] with a [`policy`] in every step; so does a simulation of an engine.
//!
//! ```
//! use deepspec_cost::{curve::CostCurve, scheduler};
//!
//! // Two requests, two drafted tokens each. Steps of 6 tokens run at 40 steps/s, of one at 100.
//! let confidences = [[0.9, 0.8], [0.3, 0.5]];
//! let curve = CostCurve::new(vec![100.0, 99.0, 98.0, 97.0, 60.0, 40.0])?;
//! assert_eq!(scheduler::prefix_lengths(&confidences, &curve)?.lengths, [2, 0]);
//! # Ok::<(), deepspec_cost::ScheduleError>(())
//! ```

mod bins;
pub mod calibrate;
pub mod cost;
pub mod cost_file;
pub mod curve;
pub mod economics;
mod error;
pub mod estimate;
pub mod least_squares;
pub mod planner;
pub mod policy;
pub mod reliability;
pub mod scheduler;
pub mod survival;
pub mod temperatures;

pub use error::ScheduleError;
