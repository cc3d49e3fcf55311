//! Trains drafters for speculative decoding: one recipe, any number of processes, exact resume.
//!
//! [`schedule`] settles what happens when, [`loader`] brings the samples, [`trainer`] is the loop. [`launch`] starts the
//! processes, [`agreement`] makes sure that they do the same, [`sync`] adds up what they have found.

mod agreement;
mod args;
pub mod checkpoint;
mod launch;
pub mod loader;
pub mod lr;
pub mod optimizer;
mod plan;
mod report;
mod run;
pub mod schedule;
mod signals;
mod sync;
mod trainer;

pub use args::Args;
pub use run::run;
