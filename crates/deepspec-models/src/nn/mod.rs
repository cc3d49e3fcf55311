//! Building blocks shared by targets and drafters.

mod builder;
mod layer;
mod rope;

pub use builder::{Builder, Init};
pub use layer::{DecoderLayer, Heads, Linear, Qkv, RmsNorm, linear};
pub use rope::{Rope, Rotation};
