//! From conversations to target states.
//!
//! A [`Source`] is what a recipe says about them: tokenizer, mask rules, target, and the identity that a cache carries.
//! [`tokenise`] turns JSONL rows into samples whose sizes are known, [`Capture`] runs the target over them, and [`fill`]
//! writes what it captured into the shards of a cache.
//!
//! Legend: N tokens of a batch, K kept last states, d hidden size, m taps.

mod batch;
mod capture;
mod error;
mod fill;
mod rows;
mod source;

pub use batch::{Budget, batches};
pub use capture::{Capture, Captured};
pub use error::StatesError;
pub use fill::fill;
pub use rows::{Rejected, Report, Tokenised, tokenise};
pub use source::{Source, identity};
