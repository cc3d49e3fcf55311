//! Shapes of grouped-query attention, and the queries, keys and values that flow into it.

use std::fmt;

use tch::Tensor;

/// Numbers of heads and their width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// H, query heads.
    pub query: i64,
    /// G, key/value heads.
    pub key_value: i64,
    /// D, width of a head.
    pub dim: i64,
}

impl Heads {
    /// Query heads per key/value head.
    pub fn num_kv_groups(&self) -> i64 {
        self.query / self.key_value
    }
}

/// Heads, scale and window of a layer's attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// Numbers of heads and their width.
    pub heads: Heads,
    /// Factor on the scores.
    pub scale: f64,
    /// Sliding window: number of tokens that a query sees, itself included. None means no window.
    pub window: Option<usize>,
    /// Whether each query head has an attention sink: a learned score that joins the softmax and has no value.
    pub sinks: bool,
}

impl fmt::Display for AttentionSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Heads { query, key_value, dim } = self.heads;
        write!(f, "{query} query heads and {key_value} key/value heads of {dim}, scale {}", self.scale)?;
        match self.window {
            Some(window) => write!(f, ", sliding_window {window}")?,
            None => write!(f, ", full attention")?,
        }
        if self.sinks { write!(f, ", attention sinks") } else { Ok(()) }
    }
}

/// Queries `[N, H, D]`, keys `[N, G, D]` and values `[N, G, D]`: after the projections, RoPE and, in some families, a norm per head. Beside
/// them are the layer's attention sinks.
pub struct Qkv {
    /// Queries.
    pub q: Tensor,
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
    /// Attention sinks, `[H]`; None if the layer has none.
    pub sinks: Option<Tensor>,
}
