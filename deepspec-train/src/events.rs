//! TensorBoard event files: records of protobuf messages. Only the messages and fields that are
//! written are defined here, under TensorFlow's names and numbers
//! (`tensorflow/core/util/event.proto`, `framework/summary.proto`, `framework/tensor.proto`,
//! `lib/io/record_writer.h`).
//!
//! The crate `tfrecord` has all messages, but its build compiles an HTTP client and a protobuf
//! compiler.

use std::io::{self, Write};

use prost::{Message, Oneof};

/// A TensorBoard event.
#[derive(Clone, PartialEq, Message)]
pub struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub wall_time: f64,
    /// Number of completed steps.
    #[prost(int64, tag = "2")]
    pub step: i64,
    /// Content of the event.
    #[prost(oneof = "EventContent", tags = "3, 5, 7")]
    pub what: Option<EventContent>,
}

/// Content of an [`Event`].
#[derive(Clone, PartialEq, Oneof)]
pub enum EventContent {
    /// Version of the file format, in the first record of every file.
    #[prost(string, tag = "3")]
    FileVersion(String),
    /// Values to plot.
    #[prost(message, tag = "5")]
    Summary(Summary),
    /// Start of a session.
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

/// Start or end of a session.
#[derive(Clone, PartialEq, Message)]
pub struct SessionLog {
    /// Status code; 1 is the start.
    #[prost(int32, tag = "1")]
    pub status: i32,
}

impl SessionLog {
    /// Start of a session: TensorBoard then discards earlier events of later steps.
    pub const START: Self = Self { status: 1 };
}

/// Values of one step.
#[derive(Clone, PartialEq, Message)]
pub struct Summary {
    /// The values, each with its own tag.
    #[prost(message, repeated, tag = "1")]
    pub value: Vec<Value>,
}

/// A value and how it is shown.
#[derive(Clone, PartialEq, Message)]
pub struct Value {
    /// Name of the value, such as `train/loss`.
    #[prost(string, tag = "1")]
    pub tag: String,
    /// The plugin that displays the value, unless it is plotted.
    #[prost(message, optional, tag = "9")]
    pub metadata: Option<Metadata>,
    /// The value.
    #[prost(oneof = "ValueContent", tags = "2, 8")]
    pub shown: Option<ValueContent>,
}

/// Content of a [`Value`].
#[derive(Clone, PartialEq, Oneof)]
pub enum ValueContent {
    /// A scalar to plot.
    #[prost(float, tag = "2")]
    Number(f32),
    /// Text.
    #[prost(message, tag = "8")]
    Tensor(Tensor),
}

/// Selects the plugin for a value.
#[derive(Clone, PartialEq, Message)]
pub struct Metadata {
    /// The plugin.
    #[prost(message, optional, tag = "1")]
    pub plugin: Option<Plugin>,
}

/// A TensorBoard plugin.
#[derive(Clone, PartialEq, Message)]
pub struct Plugin {
    /// Name of the plugin: `text`.
    #[prost(string, tag = "1")]
    pub name: String,
}

/// A tensor of texts.
#[derive(Clone, PartialEq, Message)]
pub struct Tensor {
    /// The data type, [`Tensor::DT_STRING`].
    #[prost(int32, tag = "1")]
    pub dtype: i32,
    /// The shape; empty for a scalar.
    #[prost(message, optional, tag = "2")]
    pub shape: Option<Shape>,
    /// The texts.
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub texts: Vec<Vec<u8>>,
}

impl Tensor {
    /// The data type of strings.
    pub const DT_STRING: i32 = 7;
}

/// Shape of a tensor; always that of a scalar.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Shape {}

/// Writes a record: the length, the length's checksum, the event, the event's checksum.
///
/// # Errors
/// Errors of the writer.
pub fn write_record(to: &mut impl Write, event: &Event) -> io::Result<()> {
    let event = event.encode_to_vec();
    let length = (event.len() as u64).to_le_bytes();
    for part in [&length[..], &event] {
        to.write_all(part)?;
        to.write_all(&masked_crc32c(part).to_le_bytes())?;
    }
    Ok(())
}

/// CRC-32C with TensorFlow's mask. Without the mask, the CRC of data that contains its own CRC
/// would be constant.
fn masked_crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}
