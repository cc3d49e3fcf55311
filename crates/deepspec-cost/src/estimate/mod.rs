//! Estimates time, cost and disk space of the stages from prompts to an evaluated drafter, on a
//! number of devices.
//!
//! A stage is [`Work`]: operations, bytes and passes, counted from the model architectures (`count.rs`). A device has
//! [`Rates`]: seconds per operation, per byte and per pass, which add up. Rates are fitted to measurements
//! ([`Rates::fit`]). Without measurements they are shares of the vendor's figures ([`Machine::from_vendor_figures`]). A
//! [`Pipeline`] is the work of all stages, and [`Pipeline::estimate_on`] estimates its time on a number of devices.
//! This module runs no model.

mod count;
mod error;
mod machine;
mod measured;
mod pipeline;
mod rates;
mod work;

pub use count::{
    AttentionSize, DecodeLoad, DrafterSize, ExpertsSize, ModelSize, capture_work, decode_work,
    speculation_work,
};
pub use error::ScaleError;
pub use machine::{Link, Machine, RateSource, read_hardware};
pub use measured::{MeasuredWork, read_measured};
pub use pipeline::{DiskBytes, Estimate, Pipeline, TrainingWork};
pub use rates::{ADAMW_BYTES_PER_WEIGHT, FittedRates, Rates};
pub use work::{Stage, Work};
