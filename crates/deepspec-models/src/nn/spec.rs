//! Settings of a decoder layer, without the names of families.

use deepspec_ops::{Activation, AttentionSpec, RopeSpec, SavedTensorSizes};

/// How a layer computes its attention values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueSource {
    /// The values are the output of `v_proj`.
    Projected,
    /// The values are the output of `v_proj`, RMS-normed per head without weights (Gemma 4).
    Normed,
    /// The values are the output of `k_proj`, before the key's norm and RoPE. Each head is RMS-normed
    /// without weights (Gemma 4).
    SharesKey,
}

/// Where a layer has its norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPlacement {
    /// Before attention and before the MLP.
    Pre,
    /// Before and after attention, and before and after the MLP.
    Sandwich,
}

/// How an RMS norm uses its weight w.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormWeight {
    /// The norm multiplies by w.
    Plain,
    /// The norm multiplies by 1 + w, in float32 (Gemma 3).
    OnePlus,
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
    /// How the values are computed.
    pub value: ValueSource,
    /// Where the norms are.
    pub norms: NormPlacement,
    /// Whether queries and keys are RMS-normed per head.
    pub qk_norm: bool,
    /// Whether the projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// How the norms use their weights.
    pub norm_weight: NormWeight,
    /// Factor on the outputs of attention and MLP before they are added to the residual stream.
    pub residual_scale: f64,
    /// ε of all norms.
    pub eps: f64,
    /// Activation function of the MLP's gate.
    pub activation: Activation,
    /// Whether the layer's output is multiplied by `layer_scalar` of the checkpoint.
    pub scaled: bool,
}

impl LayerSpec {
    /// Bytes that autograd saves per row: norms, queries, keys and values, the output of attention, and the MLP.
    /// A value has `value` bytes.
    pub fn saved_bytes(&self, saved: SavedTensorSizes, value: usize) -> usize {
        let (d, heads) = (self.hidden_size as usize, self.attention.heads);
        let queries = (heads.query * heads.dim) as usize;
        // No matmul follows these norms, so none saves their output.
        let after = if self.norms == NormPlacement::Sandwich { 2 * saved.norm_bytes_per_value } else { 0 };
        let head_norm = if self.qk_norm { saved.norm_bytes_per_value } else { 0 };
        d * (2 * (saved.norm_bytes_per_value + value) + after)
            + queries * (head_norm + 3 * value)
            + self.saved_key_value_bytes(saved, value)
            + saved.mlp_tensors * self.intermediate_size as usize * value
    }

    /// Bytes that autograd saves for a row's keys and values. A value has `value` bytes.
    pub fn saved_key_value_bytes(&self, saved: SavedTensorSizes, value: usize) -> usize {
        let heads = self.attention.heads;
        let head_norm = if self.qk_norm { saved.norm_bytes_per_value } else { 0 };
        let value_norm = if self.value == ValueSource::Projected { 0 } else { saved.norm_bytes_per_value };
        (heads.key_value * heads.dim) as usize * (head_norm + value_norm + 3 * value)
    }
}
