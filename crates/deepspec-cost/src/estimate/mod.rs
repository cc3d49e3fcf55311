//! Estimates time, cost and disk space of the stages from prompts to an evaluated drafter, on a
//! number of devices.
//!
//! A stage is [`Work`]: operations, bytes and passes, counted from the model architectures
//! (`count.rs`). A device has [`Rates`]: seconds per operation, per byte and per pass, which add
//! up. Rates are fitted to measurements ([`Rates::fit`]), or else are shares of the vendor's
//! figures ([`Machine::stated`]). A [`Pipeline`] is the work of all stages, and [`Pipeline::on`]
//! estimates its time on a number of devices. Nothing here runs a model.

mod count;
mod error;
mod machine;
mod measured;
mod pipeline;
mod rates;
mod work;

pub use count::{
    AttentionSize, DecodeLoad, Drafting, ModelSize, capture_work, decode_work, speculation_work,
};
pub use error::ScaleError;
pub use machine::{Basis, Link, Machine, read_hardware};
pub use measured::{Measured, read_measured};
pub use pipeline::{Bytes, Estimate, Pipeline, Training};
pub use rates::{Fit, Rates, UPDATE_BYTES};
pub use work::{Stage, Work};
