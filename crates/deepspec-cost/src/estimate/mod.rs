//! How long the stages from prompts to a judged drafter take on so many devices, what they cost, and what they write.
//!
//! A stage is [`Work`]: operations, bytes and passes, counted of the architectures that take part (`count.rs`). A device does work at
//! [`Rates`]: seconds of an operation, of a byte and of a pass, which add up. Rates are told from what was measured ([`Rates::fit`]);
//! where nothing was, they are shares of what an accelerator's makers state ([`Machine::stated`]). A [`Pipeline`] is the work of all
//! stages, and [`Pipeline::on`] says what it takes on a number of devices. Nothing here runs a model.

mod count;
mod error;
mod machine;
mod measured;
mod pipeline;
mod rates;
mod work;

pub use count::{AttentionSize, DecodeLoad, Drafting, ModelSize, captured, decoded, judged};
pub use error::ScaleError;
pub use machine::{Basis, Link, Machine, read_hardware};
pub use measured::{Measured, read_measured};
pub use pipeline::{Bytes, Estimate, Pipeline, Training};
pub use rates::{Fit, Rates, UPDATE_BYTES};
pub use work::{Stage, Work};
