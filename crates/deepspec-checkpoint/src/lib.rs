//! Checkpoint formats: drafters in the layouts ("dialects") of several tools, and [`gguf`] files.
//!
//! A [`Checkpoint`] is a folder whose dialect was told from its config.json and tensor names, read into one neutral
//! [`Drafter`]. [`convert`] plans the same drafter in another dialect: weights are copied byte for byte, names and config
//! change. What cannot be said in the other dialect, or would mean something else there, is refused with the reason. Which kinds of
//! drafters there are, and what each has of its own in which layout, the kinds say: as a [`Reader`] and as [`KindSettings`].
//!
//! Layer ids are those of the reference everywhere: L is the output of decoder layer L. Dialects that count from the
//! embedding (L + 1) are converted at the door.
//!
//! Nothing here computes with weights, and libtorch is not linked.

mod checkpoint;
mod convert;
mod dialect;
mod drafter;
mod engines;
mod error;
mod families;
mod fields;
mod folder;
pub mod gguf;
mod gguf_export;
mod kind;
mod layouts;
mod loaders;
mod numbers;
mod quantised;
mod rope;
mod serving;
mod shapes;
mod shards;
mod target;
mod tensors;
mod write;

pub use checkpoint::Checkpoint;
pub use convert::{Converted, convert};
pub use dialect::CheckpointFormat;
pub use drafter::{Drafter, Incompatibility, KindSettings, Settings, Shapes};
pub use engines::for_engine;
pub use error::CheckpointError;
pub use families::{DecoderFamily, Family};
pub use fields::Fields;
pub use gguf::{TensorType, Value as GgufValue};
pub use gguf_export::Gguf;
pub use kind::{Container, Engine, EngineLayout, GgufParts, Speculators, Verdict, keys};
pub use layouts::{
    ContainerConfig, Decoder, ExternalClass, Known, Reader, foreign_attention, foreign_layout, taps,
};
pub use loaders::{Loader, loaders};
pub use quantised::quantised_folder;
pub use serving::{Risk, Server, risks};
pub use shards::{MAX_SHARD_BYTES, Shard, cut, no_weights, write_index};
pub use target::Target;
pub use tensors::{TensorFacts, Tensors, is_readable, quantised};
