//! Building blocks shared by targets and drafters.

mod builder;
mod layer;
mod linear;
mod rope;
mod spec;
mod vocabulary;

pub use builder::{Builder, Init, Named};
pub use layer::{DecoderLayer, Half, Linear, Qkv, RmsNorm, Spread};
pub use linear::Weight;
pub use rope::{Ropes, Rotation, Rotations};
pub use spec::{Activation, AttentionSpec, Heads, LayerSpec, Norms, RopeSpec, Scaling, Value, Yarn};
pub use vocabulary::Vocabulary;
