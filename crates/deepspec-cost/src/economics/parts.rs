//! Operations and memory traffic of the parts of a layer: attention and feed-forward.

use serde::{Deserialize, Serialize};

use super::{describe_invalid_value, infinite, is_non_negative, is_positive_number, one};

/// Operations and bytes of a part of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Number of operations.
    pub operations: f64,
    /// Number of bytes.
    pub bytes: f64,
}

impl Work {
    /// Operations per byte.
    pub fn intensity(self) -> f64 {
        self.operations / self.bytes
    }

    /// Seconds at `peak` operations and `bandwidth` bytes per second, whichever takes longer.
    pub(super) fn seconds(self, peak: f64, bandwidth: f64) -> f64 {
        (self.operations / peak).max(self.bytes / bandwidth)
    }
}

/// Attention of one layer, without its projections.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Attention {
    /// Grouped-query attention: each group of query heads shares a key and a value head.
    Grouped {
        /// Number of query heads n_h.
        heads: f64,
        /// Number of key and value heads.
        kv_heads: f64,
        /// Width of a head.
        head_dim: f64,
        /// Bytes per value of the KV cache.
        kv_bytes: f64,
        /// Maximum number of tokens that a query attends to.
        #[serde(default = "infinite")]
        window: f64,
    },
    /// Multi-head latent attention (MLA) in its absorbed form: all heads share one latent vector
    /// per token.
    Latent {
        /// Number of query heads n_h.
        heads: f64,
        /// Width d_c of the latent vector.
        latent: f64,
        /// Width d_r of the rotary part.
        rope: f64,
        /// Bytes b_kv per value of the KV cache.
        kv_bytes: f64,
        /// Bytes b_q per value of a query.
        query_bytes: f64,
        /// Number of tokens per stored vector: 128 in heavily compressed layers.
        #[serde(default = "one")]
        compression: f64,
        /// Maximum number of stored vectors that an indexer selects for each query, after it has
        /// read the keys of all.
        #[serde(default = "infinite")]
        top: f64,
        /// Width of an indexer key, one byte per value; 0 without an indexer.
        #[serde(default)]
        index: f64,
        /// Number of indexer query heads.
        #[serde(default)]
        index_heads: f64,
    },
    /// Linear attention by the gated delta rule, as in Qwen3.5: a matrix per head is the whole memory of the context.
    Linear {
        /// Number of heads, each with its own state.
        heads: f64,
        /// Rows of a state: width of a key.
        key_dim: f64,
        /// Columns of a state: width of a value.
        value_dim: f64,
        /// Bytes per value of a state.
        state_bytes: f64,
    },
}

/// Operations on each value of a state for one token: decay 1, prediction 2, update 2, output 2.
const DELTA_RULE_OPERATIONS: f64 = 7.0;

impl Attention {
    /// Work of T queries at a context of S tokens.
    pub fn work(&self, queries: f64, context: f64) -> Work {
        match *self {
            Self::Grouped { heads, kv_heads, head_dim, kv_bytes, window } => {
                let seen = context.min(window);
                Work {
                    operations: 4.0 * heads * head_dim * queries * seen,
                    bytes: 2.0 * kv_heads * head_dim * kv_bytes * seen
                        + 2.0 * 2.0 * heads * head_dim * queries,
                }
            }
            Self::Latent {
                heads,
                latent,
                rope,
                kv_bytes,
                query_bytes,
                compression,
                top,
                index,
                index_heads,
            } => {
                let stored = context / compression;
                let (operations, bytes) = (2.0 * heads * (2.0 * latent + rope), (latent + rope) * kv_bytes);
                // The queries of one request select nearly the same vectors, so each vector is read
                // once.
                Work {
                    operations: operations * queries * stored.min(top)
                        + 2.0 * index_heads * index * queries * stored,
                    bytes: bytes * stored.min(top)
                        + index * stored
                        + heads * (latent + rope) * query_bytes * queries,
                }
            }
            Self::Linear { heads, key_dim, value_dim, state_bytes } => {
                let state = heads * key_dim * value_dim;
                // Engines read the state once and keep one per token, so that rejected tokens can be undone.
                Work {
                    operations: DELTA_RULE_OPERATIONS * state * queries,
                    bytes: state * state_bytes * (1.0 + queries),
                }
            }
        }
    }

    /// The first invalid value, if there is one.
    pub(super) fn describe_invalid_value(&self) -> Option<String> {
        let (needed, allowed, limit) = match *self {
            Self::Grouped { heads, kv_heads, head_dim, kv_bytes, window } => (
                vec![
                    ("heads", heads),
                    ("kv_heads", kv_heads),
                    ("head_dim", head_dim),
                    ("kv_bytes", kv_bytes),
                ],
                vec![],
                Some(("window", window)),
            ),
            Self::Latent {
                heads,
                latent,
                rope,
                kv_bytes,
                query_bytes,
                compression,
                top,
                index,
                index_heads,
            } => (
                vec![
                    ("heads", heads),
                    ("latent", latent),
                    ("kv_bytes", kv_bytes),
                    ("compression", compression),
                ],
                vec![
                    ("rope", rope),
                    ("query_bytes", query_bytes),
                    ("index", index),
                    ("index_heads", index_heads),
                ],
                Some(("top", top)),
            ),
            Self::Linear { heads, key_dim, value_dim, state_bytes } => (
                vec![
                    ("heads", heads),
                    ("key_dim", key_dim),
                    ("value_dim", value_dim),
                    ("state_bytes", state_bytes),
                ],
                vec![],
                None,
            ),
        };
        let limit = limit.as_slice();
        describe_invalid_value(&needed, is_positive_number, "a positive number")
            .or(describe_invalid_value(&allowed, is_non_negative, "a number of at least 0"))
            .or(describe_invalid_value(limit, |value| value > 0.0, "a positive number"))
    }
}

/// Number of queries per request above which expanding latent vectors into keys and values of every
/// head is cheaper than absorbed attention. `nope` and `value` are the widths of a head's
/// non-rotary key and of its value.
pub fn mla_expansion_break_even(latent: f64, nope: f64, value: f64) -> f64 {
    // The rotary widths cancel: 2·d_c + d_r against nope + d_r + value.
    latent * (nope + value) / (2.0 * latent - nope - value)
}

/// Feed-forward part of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum FeedForward {
    /// One MLP for all tokens.
    Dense {
        /// Number of weights.
        weights: f64,
    },
    /// Mixture of experts: each token is routed to some of the experts.
    Experts {
        /// Weights of one expert.
        weights: f64,
        /// Number of experts E.
        experts: f64,
        /// Number of experts k that each token is routed to.
        active: f64,
        /// Number of shared experts that every token uses.
        #[serde(default)]
        shared: f64,
    },
}

/// A(B) = E (1 − (1 − k/E)^B): number of experts that B independently routed tokens activate.
pub fn experts_touched(experts: f64, active: f64, tokens: f64) -> f64 {
    experts * (1.0 - (1.0 - active / experts).powf(tokens))
}

/// A'(B): number of experts that one more token activates.
pub fn experts_touched_by_another(experts: f64, active: f64, tokens: f64) -> f64 {
    let untouched = 1.0 - active / experts;
    // With k = E, the first token has already activated all experts.
    if untouched <= 0.0 {
        return 0.0;
    }
    -experts * untouched.ln() * untouched.powf(tokens)
}

impl FeedForward {
    /// Work of `tokens` tokens, with `bytes` per weight.
    pub fn work(&self, tokens: f64, bytes: f64) -> Work {
        self.work_per_device(tokens, bytes, 1.0)
    }

    /// Work of one of `devices` accelerators that share the tokens and the routed experts. It
    /// computes its share of the tokens. It reads the dense or shared weights, and the weights of
    /// its experts that any token activates.
    pub fn work_per_device(&self, tokens: f64, bytes: f64, devices: f64) -> Work {
        let own = tokens / devices;
        match *self {
            Self::Dense { weights } => Work { operations: 2.0 * weights * own, bytes: weights * bytes },
            Self::Experts { weights, experts, active, shared } => Work {
                operations: 2.0 * (active + shared) * weights * own,
                bytes: (experts_touched(experts, active, tokens) / devices + shared) * weights * bytes,
            },
        }
    }

    /// Weight bytes that one more token reads, relative to the mean per token of a step of
    /// B = `tokens` tokens. For experts: B·A'(B) / (A(B) + shared), with A of [`experts_touched`] and
    /// A' of [`experts_touched_by_another`]. A dense MLP gives 0, because every step reads all its
    /// weights.
    pub fn marginal_cost(&self, tokens: f64) -> f64 {
        match *self {
            Self::Dense { .. } => 0.0,
            Self::Experts { experts, active, shared, .. } => {
                tokens * experts_touched_by_another(experts, active, tokens)
                    / (experts_touched(experts, active, tokens) + shared)
            }
        }
    }

    /// The first invalid value, if there is one.
    pub(super) fn describe_invalid_value(&self) -> Option<String> {
        match *self {
            Self::Dense { weights } => {
                describe_invalid_value(&[("weights", weights)], is_positive_number, "a positive number")
            }
            Self::Experts { weights, experts, active, shared } => {
                let sizes = [("weights", weights), ("experts", experts)];
                describe_invalid_value(&sizes, is_positive_number, "a positive number")
                    .or(describe_invalid_value(
                        &[("active", active)],
                        |count| count >= 1.0 && count <= experts,
                        "at least 1 and no more than `experts`",
                    ))
                    .or(describe_invalid_value(
                        &[("shared", shared)],
                        is_non_negative,
                        "a number of at least 0",
                    ))
            }
        }
    }
}
