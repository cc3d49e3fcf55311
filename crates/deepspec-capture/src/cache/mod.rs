//! The sharded on-disk cache of target hidden states.
//!
//! A finished cache is a folder with three kinds of files, all readable by other tools:
//!
//! `manifest.json`, written last: a folder with it is a finished cache ([`Manifest`]);
//! `samples.parquet`, one row per sample: its rows in the shards, token ids, supervised spans and
//! checksum;
//! `shard-NNNNN.safetensors`: `taps [N, m·d]` and `last [M, d]` with one row per token, in
//! bfloat16. Other encodings use one byte per value, with scales `taps_scale [N, m]` and
//! `last_scale [M]`, or with compressed `exponents` ([`Encoding`]).
//!
//! Shapes: N tokens of a shard, M tokens with a stored final hidden state ([`FinalStates`]), m taps
//! ([`Tap`]), d hidden size. A sample's rows are contiguous in both tensors.
//!
//! Writing: [`Plan::new`] fixes every size before the target runs, [`Builder`] writes shards and
//! resumes after a kill, and [`Builder::publish`] commits. Reading: [`Reader`] maps the shards and
//! checks each sample on first read. [`verify`] checks all bytes, and [`inspect`] computes
//! statistics of one sample.

mod bf16z;
mod builder;
mod codec;
mod error;
mod files;
mod fp8;
mod identity;
mod inspect;
mod layout;
mod manifest;
mod merge;
mod parts;
mod pieces;
mod plan;
mod reader;
mod reference;
mod sample;
mod samples;
mod shard;
mod values;
mod verify;
mod writer;

pub use builder::Builder;
pub use codec::stored_bytes;
pub use deepspec_core::FinalStates;
pub use error::{CacheError, Part};
pub use files::{CacheTotals, SamplesEntry, ShardEntry};
pub use identity::Identity;
pub use inspect::{Inspection, TensorSummary, inspect};
pub use layout::{Encoding, Layout, loss_mask};
pub use manifest::{MANIFEST_FILE, Manifest};
pub use merge::merge;
pub use parts::{Worker, remove_cache};
pub use plan::{Plan, PlannedShard};
pub use reader::map::{MappedFile, page_bytes};
pub use reader::{MAX_MAPPED_BYTES, Reader, Sample};
pub use reference::{ReferenceCache, export};
pub use sample::PlannedSample;
pub use samples::SAMPLES_FILE;
pub use verify::{Problem, verify};
pub use writer::ShardWriter;
