//! Trains drafters for speculative decoding: one recipe, any number of processes, exact resume.
//!
//! [`schedule`] settles what happens when, [`loader`] brings the samples and [`staging`] their states to a GPU, [`trainer`] is the loop. [`launch`] starts the
//! processes, [`rank_check`] makes sure that they do the same, [`sync`] adds up what they have found.

mod args;
mod bench;
mod budget;
pub mod checkpoint;
pub mod dist;
mod dummy_data;
mod estimate;
mod evaluation;
mod events;
mod gpu_info;
mod launch;
pub mod loader;
pub mod lr;
mod memory;
pub mod optimizer;
mod plan;
mod rank_check;
mod reference;
mod reporters;
mod run;
pub mod schedule;
mod setup;
mod show_plan;
mod signals;
mod staging;
mod sync;
mod target_shape;
mod tensorboard;
mod trainer;
mod window;

pub use args::Args;
pub use reference::DESCRIPTIONS;
pub use run::run;
