//! Hidden states of a target, from conversations to the [`cache`] on disk.
//!
//! A [`TargetSpec`] is what a recipe says about them: tokenizer, mask rules, target, and the identity that a cache carries.
//! [`tokenise`] turns JSONL rows into samples whose sizes are known, [`Capture`] runs the target over them, and [`fill`]
//! writes what it captured into the shards of a cache.
//!
//! A [`Dataset`] is the samples that a drafter learns from, and a [`StateSource`] hands out their states: from a cache,
//! from the target itself, or from the target until there is a cache.
//!
//! Legend: N tokens of a batch, K kept last states, d hidden size, m taps.

mod batch;
pub mod cache;
mod capture;
mod dataset;
mod error;
mod fill;
mod hybrid;
mod online;
mod rows;
mod samples;
mod source;
mod states;
mod stored;

pub use batch::{Budget, batches, windows};
pub use capture::{Capture, Captured};
pub use dataset::Dataset;
pub use error::StatesError;
pub use fill::fill;
pub use online::SampleStates;
pub use rows::{Rejected, RowCounts, Tokenised, tokenise, unknown_token};
pub use samples::SampleMeta;
pub use source::{TargetSpec, chat_template, check_fit, check_rules, identity, mask_rules};
pub use states::{StateSource, TargetRuntime};
pub use stored::readers;
