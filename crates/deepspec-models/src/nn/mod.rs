//! Building blocks shared by targets and drafters.

mod builder;
mod layer;
mod linear;
mod rope;
mod spec;
mod vocabulary;

pub use builder::{Builder, Init, StateDict};
pub use layer::{BroadcastRows, DecoderLayer, Half, Linear, Qkv, RmsNorm};
pub use linear::Weight;
pub use rope::{RotaryEmbeddings, Rotation, Rotations};
pub use spec::{Activation, AttentionSpec, Heads, LayerSpec, Norms, RopeSpec, Scaling, Value, Yarn};
pub use vocabulary::EmbedHead;
