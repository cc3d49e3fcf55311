//! Captures hidden states of a target from conversations and stores them in the [`cache`] on disk.
//!
//! A [`TargetSpec`] resolves a recipe: tokenizer, mask rules, target, and the identity of its
//! caches. [`tokenise`] turns JSONL rows into samples of known sizes, and [`Capture`] runs the
//! target over them. [`fill_shards`] writes the captured states to the shards of a cache.
//!
//! A [`Dataset`] has the samples that a drafter trains on. A [`StateSource`] returns their states
//! from a cache, from the target, or from the target until a cache is finished.
//!
//! Shapes: N tokens of a batch, K stored final hidden states, d hidden size, m taps.

mod batch;
pub mod cache;
mod capture;
mod dataset;
mod error;
mod fill;
mod hybrid;
mod live;
mod online;
mod recorder;
mod rows;
mod samples;
pub mod served;
mod source;
mod states;
mod stored;

pub use batch::{ForwardLimits, split_by_tokens, split_into_batches};
pub use capture::{Capture, Captured};
pub use dataset::Dataset;
pub use error::StatesError;
pub use fill::{fill_shards, fill_shards_from_answers, fill_shards_from_servers};
pub use online::SampleStates;
pub use rows::{Rejected, RowCounts, TokenisedRows, tokenise, unknown_token};
pub use samples::SampleMeta;
pub use source::{TargetSpec, chat_template, check_recipe_fits, check_template_tags, identity, mask_rules};
pub use states::{StateSource, TargetRuntime};
pub use stored::reader_threads;
