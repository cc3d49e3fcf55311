//! Files, JSONL, configuration, logging and counter-based random numbers, shared by the DeepSpec
//! tools.
//!
//! This crate does not link libtorch, so crates that depend only on it build and test in seconds.

pub mod atomic;
pub mod cli;
pub mod command_line;
pub mod config;
pub mod digest;
pub mod env;
mod final_states;
pub mod jsonl;
pub mod page;
pub mod progress;
pub mod recipe;
pub mod rng;
pub mod row;
mod slot_target;
mod tap;

pub use final_states::FinalStates;
pub use slot_target::SlotTarget;
pub use tap::Tap;

/// Version of the build and, after `+g`, the commit of a release. Written files record it.
pub const VERSION: &str = env!("DEEPSPEC_VERSION");
