//! Costs in plain numbers: confidence reliability, calibration, verification scheduling, and [`estimate`]s of whole pipelines.
//!
//! A drafter proposes up to γ tokens per request and, for each, a *confidence* c_k: the probability that the target
//! accepts token k given that it accepted those before. Their running product is the *survival* a_k = Π_{i≤k} c_i, the
//! probability that the whole prefix up to k is accepted (docs/architecture.md, Reliability). Three questions are asked of these numbers:
//!
//! - [`reliability`]: does a_k say what happens? ECE, AUROC and Brier score per position.
//! - [`calibrate`]: which temperatures t_k make it say so? Sequential temperature scaling (STS).
//! - [`scheduler`]: how much of each proposal is worth verifying, given what a larger batch costs ([`curve`])?
//!
//! An engine asks a [`planner`] that follows a [`policy`], step by step; so does a simulation of one.
//!
//! ```
//! use deepspec_cost::{curve::CostCurve, scheduler};
//!
//! // Two requests, two drafted tokens each; verifying up to 6 tokens a step slows the target from 100 to 40 steps/s.
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
