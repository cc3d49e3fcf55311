//! Test helpers: golden cases, conversations, folders, tiny random targets and damaged JSON. Also
//! faulty servers, a fake hub, a fake GPU, tests of distributions, signals, and records of skipped
//! tests.
//!
//! For use as a dev-dependency; a broken fixture panics with its name.

pub mod conversations;
pub mod device_detection;
pub mod distribution;
pub mod fake_gpu;
pub mod folder;
pub mod golden;
pub mod hub;
pub mod mutate;
mod noise;
pub mod server;
pub mod signal;
pub mod skip;
pub mod tiny;

pub use noise::noise;
