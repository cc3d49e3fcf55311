//! Settings of a decoder layer, without the names of families.

use deepspec_ops::{Activation, AttentionSpec, RopeSpec};

/// The source of a layer's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value {
    /// Their own projection.
    Projected,
    /// Their own projection, RMS-normed per head without weights.
    Normed,
    /// The key projection before norm and rotation, RMS-normed per head without weights.
    SharesKey,
}

/// The places of a layer's norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norms {
    /// Before attention and before the MLP.
    Pre,
    /// Before and after both.
    Sandwich,
}

/// One decoder layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// d, width of the residual stream.
    pub hidden_size: i64,
    /// Width inside the MLP.
    pub intermediate_size: i64,
    /// Heads, scale and window.
    pub attention: AttentionSpec,
    /// Rotary embedding of queries and keys.
    pub rope: RopeSpec,
    /// The source of the values.
    pub value: Value,
    /// The places of the norms.
    pub norms: Norms,
    /// Whether queries and keys are RMS-normed per head.
    pub qk_norm: bool,
    /// ε of all norms.
    pub eps: f64,
    /// The MLP's gate.
    pub activation: Activation,
    /// Whether the layer's output is multiplied by a stored number.
    pub scaled: bool,
}
