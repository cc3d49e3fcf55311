//! Event files as TensorBoard reads them: records of messages, of which those stand here that are written, under TensorFlow's names and numbers
//! (`tensorflow/core/util/event.proto`, `framework/summary.proto`, `framework/tensor.proto`, `lib/io/record_writer.h`).
//!
//! The crate `tfrecord`, which has all of them, compiles an HTTP client and a compiler of protocols before it can be built.

use std::io::{self, Write};

use prost::{Message, Oneof};

/// What happened at a step.
#[derive(Clone, PartialEq, Message)]
pub struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub wall_time: f64,
    /// Steps done.
    #[prost(int64, tag = "2")]
    pub step: i64,
    /// What it was.
    #[prost(oneof = "What", tags = "3, 5, 7")]
    pub what: Option<What>,
}

/// What an [`Event`] says.
#[derive(Clone, PartialEq, Oneof)]
pub enum What {
    /// The first record of every file.
    #[prost(string, tag = "3")]
    FileVersion(String),
    /// Values to show.
    #[prost(message, tag = "5")]
    Summary(Summary),
    /// Where a session begins.
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

/// Where a session begins or ends.
#[derive(Clone, PartialEq, Message)]
pub struct SessionLog {
    /// One of its states; 1 is the start.
    #[prost(int32, tag = "1")]
    pub status: i32,
}

impl SessionLog {
    /// A session begins: what was written of later steps no longer holds.
    pub const START: Self = Self { status: 1 };
}

/// Values of one moment.
#[derive(Clone, PartialEq, Message)]
pub struct Summary {
    /// Each under a tag of its own.
    #[prost(message, repeated, tag = "1")]
    pub value: Vec<Value>,
}

/// A value and how it is shown.
#[derive(Clone, PartialEq, Message)]
pub struct Value {
    /// Its name, `train/loss`.
    #[prost(string, tag = "1")]
    pub tag: String,
    /// What shows it, where that is no plot.
    #[prost(message, optional, tag = "9")]
    pub metadata: Option<Metadata>,
    /// The value.
    #[prost(oneof = "Shown", tags = "2, 8")]
    pub shown: Option<Shown>,
}

/// What a [`Value`] is.
#[derive(Clone, PartialEq, Oneof)]
pub enum Shown {
    /// A point of a plot.
    #[prost(float, tag = "2")]
    Number(f32),
    /// Text.
    #[prost(message, tag = "8")]
    Tensor(Tensor),
}

/// What shows a value.
#[derive(Clone, PartialEq, Message)]
pub struct Metadata {
    /// By its name.
    #[prost(message, optional, tag = "1")]
    pub plugin: Option<Plugin>,
}

/// A part of TensorBoard.
#[derive(Clone, PartialEq, Message)]
pub struct Plugin {
    /// `text`.
    #[prost(string, tag = "1")]
    pub name: String,
}

/// A tensor of texts.
#[derive(Clone, PartialEq, Message)]
pub struct Tensor {
    /// What it is made of, [`Tensor::TEXT`].
    #[prost(int32, tag = "1")]
    pub dtype: i32,
    /// Without sizes, for a scalar.
    #[prost(message, optional, tag = "2")]
    pub shape: Option<Shape>,
    /// Its texts.
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub texts: Vec<Vec<u8>>,
}

impl Tensor {
    /// The type of texts.
    pub const TEXT: i32 = 7;
}

/// The sizes of a tensor; none of a scalar.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Shape {}

/// Writes a record: its length, the length's checksum, the event, the event's checksum.
///
/// # Errors
/// The writer's.
pub fn write(to: &mut impl Write, event: &Event) -> io::Result<()> {
    let event = event.encode_to_vec();
    let length = (event.len() as u64).to_le_bytes();
    for part in [&length[..], &event] {
        to.write_all(part)?;
        to.write_all(&checksum(part).to_le_bytes())?;
    }
    Ok(())
}

/// CRC-32C, masked as TensorFlow does it, because the CRC of data that holds its own CRC is the same for all data.
fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}
