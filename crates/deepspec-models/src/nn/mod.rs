//! Building blocks shared by targets and drafters.

mod attention;
mod builder;
mod gated_delta_net;
mod gru;
mod layer;
mod linear;
mod mlp;
mod rope;
mod spec;
mod vocabulary;

pub use attention::KeyValueProjection;
pub use builder::{Builder, Init, StateDict};
pub use deepspec_ops::{
    Activation, AttentionSpec, GatedDeltaSpec, Heads, Qkv, RopeSpec, Rotation, RouterScores, Scaling, Weight,
    Yarn,
};
pub use gated_delta_net::LinearAttentionLayer;
pub use gru::Gru;
pub use layer::{DecoderLayer, LayerHook, LayerInput};
pub use linear::{Linear, RmsNorm};
pub use rope::{RotaryEmbeddings, Rotations};
pub use spec::{ExpertTensors, ExpertsSpec, LayerSpec, NormPlacement, NormWeight, ValueSource};
pub use vocabulary::EmbedHead;
