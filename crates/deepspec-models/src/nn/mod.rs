//! Building blocks shared by targets and drafters.

mod attention;
mod builder;
mod layer;
mod linear;
mod rope;
mod spec;
mod vocabulary;

pub use builder::{Builder, Init, StateDict};
pub use deepspec_ops::{Activation, AttentionSpec, Heads, Qkv, Weight};
pub use layer::{DecoderLayer, LayerHook, LayerInput};
pub use linear::{Linear, RmsNorm};
pub use rope::{RotaryEmbeddings, Rotation, Rotations};
pub use spec::{LayerSpec, Norms, RopeSpec, Scaling, Value, Yarn};
pub use vocabulary::EmbedHead;
