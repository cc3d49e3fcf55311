//! Trains drafters for speculative decoding: one recipe, one process, exact resume.
//!
//! [`schedule`] settles what happens when, [`loader`] brings the samples, [`trainer`] is the loop.

mod args;
pub mod checkpoint;
pub mod loader;
pub mod lr;
pub mod optimizer;
mod plan;
mod report;
mod run;
pub mod schedule;
mod trainer;

pub use args::Args;
pub use run::run;
