//! Helpers for tests: golden cases and tolerances, conversations, files of a folder, small random targets, damaged JSON, a server that misbehaves, a hub on
//! loopback, a GPU that is none, laws of outputs, signals, and an account of tests that do not run here.
//!
//! Meant as a dev-dependency; a broken fixture panics with its name.

pub mod conversations;
pub mod folder;
pub mod golden;
pub mod hub;
pub mod law;
pub mod machine;
pub mod mutate;
mod noise;
pub mod server;
pub mod signal;
pub mod skip;
pub mod standin;
pub mod tiny;

pub use noise::noise;
