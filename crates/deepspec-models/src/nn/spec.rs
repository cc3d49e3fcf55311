//! Facts about a decoder layer. Families state them, layers and caches read them; nothing here knows a family's name.

use deepspec_ops::{Activation, AttentionSpec, RopeSpec};

/// Where a layer's values come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value {
    /// A projection of their own.
    Projected,
    /// A projection of their own, RMS-normed per head without weights.
    Normed,
    /// What the key projection gives, before norm and rotation, RMS-normed per head without weights.
    SharesKey,
}

/// Where a layer's norms stand.
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
    /// Where the values come from.
    pub value: Value,
    /// Where the norms stand.
    pub norms: Norms,
    /// Whether queries and keys are RMS-normed per head.
    pub qk_norm: bool,
    /// ε of all of them.
    pub eps: f64,
    /// The MLP's gate.
    pub activation: Activation,
    /// Whether the layer's output is multiplied by a stored number.
    pub scaled: bool,
}
