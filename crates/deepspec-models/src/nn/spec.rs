//! Settings of a decoder layer, without the names of families.

use deepspec_ops::{Activation, AttentionSpec, RopeSpec, SavedTensors};

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

impl LayerSpec {
    /// Bytes that autograd saves of a row: norms, queries, keys and values, the attention's output, and the MLP. A value has `value` bytes.
    pub fn saved_bytes(&self, saved: SavedTensors, value: usize) -> usize {
        let (d, heads) = (self.hidden_size as usize, self.attention.heads);
        let queries = (heads.query * heads.dim) as usize;
        // Norms after attention and MLP have no product after them that would save their output.
        let after = if self.norms == Norms::Sandwich { 2 * saved.norm } else { 0 };
        let head_norm = if self.qk_norm { saved.norm } else { 0 };
        d * (2 * (saved.norm + value) + after)
            + queries * (head_norm + 3 * value)
            + self.saved_key_value_bytes(saved, value)
            + saved.mlp * self.intermediate_size as usize * value
    }

    /// Bytes that autograd saves of a row's keys and values.
    pub fn saved_key_value_bytes(&self, saved: SavedTensors, value: usize) -> usize {
        let heads = self.attention.heads;
        let head_norm = if self.qk_norm { saved.norm } else { 0 };
        let value_norm = if self.value == Value::Projected { 0 } else { saved.norm };
        (heads.key_value * heads.dim) as usize * (head_norm + value_norm + 3 * value)
    }
}
