//! Files, JSONL, configuration, logging and counter-based randomness shared by the DeepSpec tools.
//!
//! Nothing here links libtorch, so everything that only needs these parts builds and tests in seconds.

pub mod atomic;
pub mod cli;
pub mod command_line;
pub mod config;
pub mod digest;
pub mod env;
mod final_states;
pub mod jsonl;
pub mod progress;
pub mod recipe;
pub mod rng;
pub mod row;
mod slots;
mod tap;

pub use final_states::FinalStates;
pub use slots::Slots;
pub use tap::Tap;

/// What was built: the version and, behind a `+g`, the commit of a release. Artifacts say it of themselves.
pub const VERSION: &str = env!("DEEPSPEC_VERSION");
