//! Trains drafters for speculative decoding, on one or several processes, with exact resume.
//!
//! [`schedule`] plans the steps and [`trainer`] runs the training loop. [`loader`] prepares
//! samples, and [`staging`] copies their hidden states to a GPU. [`launch`] starts the processes,
//! [`rank_check`] compares their inputs, and [`sync`] sums their gradients.

mod args;
mod bench;
mod budget;
pub mod checkpoint;
pub mod dist;
mod dummy_data;
mod dummy_run;
mod estimate;
mod evaluation;
mod events;
mod gpu_info;
mod launch;
pub mod loader;
pub mod lr;
mod memory;
mod metrics_window;
pub mod optimizer;
mod plan;
mod rank_check;
mod reference;
mod reporters;
mod run;
mod run_report;
pub mod schedule;
mod setup;
mod show_plan;
mod signals;
mod staging;
mod sync;
mod target_shape;
mod tensorboard;
mod trainer;

pub use args::{Args, Invocation};
pub use reference::PRINTABLE_DESCRIPTIONS;
pub use run::run;
