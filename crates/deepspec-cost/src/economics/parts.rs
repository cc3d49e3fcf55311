//! What the parts of a layer compute and read: attention and the feed-forward part.

use serde::{Deserialize, Serialize};

use super::{at_least_0, endless, one, positive, wrong};

/// What attention of some queries of one request computes and reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Operations.
    pub operations: f64,
    /// Bytes.
    pub bytes: f64,
}

impl Work {
    /// Operations per byte.
    pub fn intensity(self) -> f64 {
        self.operations / self.bytes
    }

    /// Seconds at so many operations and bytes per second, whichever takes longer.
    pub(super) fn seconds(self, peak: f64, bandwidth: f64) -> f64 {
        (self.operations / peak).max(self.bytes / bandwidth)
    }
}

/// Attention of one layer, without its projections.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Attention {
    /// Every group of query heads shares a key and a value head.
    Grouped {
        /// n_h.
        heads: f64,
        /// Key and value heads.
        kv_heads: f64,
        /// Width of a head.
        head_dim: f64,
        /// Bytes of a stored number.
        kv_bytes: f64,
        /// Tokens that a query sees at most.
        #[serde(default = "endless")]
        window: f64,
    },
    /// Queries attend to one latent vector per token, shared by all heads (MLA, in its absorbed form).
    Latent {
        /// n_h.
        heads: f64,
        /// d_c.
        latent: f64,
        /// d_r, the part with positions.
        rope: f64,
        /// b_kv.
        kv_bytes: f64,
        /// b_q.
        query_bytes: f64,
        /// Tokens that one stored vector stands for: 128 in heavily compressed layers.
        #[serde(default = "one")]
        compression: f64,
        /// Stored vectors that an indexer picks for each query at most; it reads the keys of all of them first.
        #[serde(default = "endless")]
        top: f64,
        /// Width of an indexer's key, one byte each; 0 where there is no indexer.
        #[serde(default)]
        index: f64,
        /// Heads of its queries.
        #[serde(default)]
        index_heads: f64,
    },
}

impl Attention {
    /// Of T queries behind S tokens.
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
                // Queries of one request pick much the same vectors, so that those are read once.
                Work {
                    operations: operations * queries * stored.min(top)
                        + 2.0 * index_heads * index * queries * stored,
                    bytes: bytes * stored.min(top)
                        + index * stored
                        + heads * (latent + rope) * query_bytes * queries,
                }
            }
        }
    }

    /// What is wrong about it, if anything is.
    pub(super) fn problem(&self) -> Option<String> {
        let (needed, allowed, limit) = match *self {
            Self::Grouped { heads, kv_heads, head_dim, kv_bytes, window } => (
                vec![
                    ("heads", heads),
                    ("kv_heads", kv_heads),
                    ("head_dim", head_dim),
                    ("kv_bytes", kv_bytes),
                ],
                vec![],
                ("window", window),
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
                ("top", top),
            ),
        };
        wrong(&needed, positive, "a positive number")
            .or(wrong(&allowed, at_least_0, "a number of at least 0"))
            .or(wrong(&[limit], |value| value > 0.0, "a positive number"))
    }
}

/// Queries of one request from which on it is cheaper to expand latent vectors into keys and values of every head than to attend to the
/// vectors themselves; `nope` and `value` are the widths of a head's key without positions and of its value.
pub fn expanding_pays_from(latent: f64, nope: f64, value: f64) -> f64 {
    // Widths with positions cancel: 2·d_c + d_r against nope + d_r + value.
    latent * (nope + value) / (2.0 * latent - nope - value)
}

/// The feed-forward part of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum FeedForward {
    /// One for all tokens.
    Dense {
        /// Weights.
        weights: f64,
    },
    /// Each token goes to some experts.
    Experts {
        /// Weights of one expert.
        weights: f64,
        /// E.
        experts: f64,
        /// k, of which each token takes so many.
        active: f64,
        /// Experts that every token takes.
        #[serde(default)]
        shared: f64,
    },
}

/// A(B) = E (1 − (1 − k/E)^B): experts that B tokens touch, were each to choose by itself.
pub fn experts_touched(experts: f64, active: f64, tokens: f64) -> f64 {
    experts * (1.0 - (1.0 - active / experts).powf(tokens))
}

/// A'(B): experts that one more token touches.
pub fn experts_touched_by_another(experts: f64, active: f64, tokens: f64) -> f64 {
    let untouched = 1.0 - active / experts;
    // Each token touches all of them: the first one has left none.
    if untouched <= 0.0 {
        return 0.0;
    }
    -experts * untouched.ln() * untouched.powf(tokens)
}

impl FeedForward {
    /// Of so many tokens, with weights of so many bytes each.
    pub fn work(&self, tokens: f64, bytes: f64) -> Work {
        self.work_of_one(tokens, bytes, 1.0)
    }

    /// Of one of so many accelerators that divide the tokens among them, and the experts but for the shared ones: it reads all other weights
    /// for its share of the tokens, and of the experts those of its own that any token touches.
    pub fn work_of_one(&self, tokens: f64, bytes: f64, devices: f64) -> Work {
        let own = tokens / devices;
        match *self {
            Self::Dense { weights } => Work { operations: 2.0 * weights * own, bytes: weights * bytes },
            Self::Experts { weights, experts, active, shared } => Work {
                operations: 2.0 * (active + shared) * weights * own,
                bytes: (experts_touched(experts, active, tokens) / devices + shared) * weights * bytes,
            },
        }
    }

    /// B·A'(B) / (A(B) + shared): how much of a token's share in the cost of a batch the next one adds while weights are what takes time.
    /// 0 for a dense part, whose weights are read already.
    pub fn marginal(&self, tokens: f64) -> f64 {
        match *self {
            Self::Dense { .. } => 0.0,
            Self::Experts { experts, active, shared, .. } => {
                tokens * experts_touched_by_another(experts, active, tokens)
                    / (experts_touched(experts, active, tokens) + shared)
            }
        }
    }

    /// What is wrong about it, if anything is.
    pub(super) fn problem(&self) -> Option<String> {
        match *self {
            Self::Dense { weights } => wrong(&[("weights", weights)], positive, "a positive number"),
            Self::Experts { weights, experts, active, shared } => {
                let sizes = [("weights", weights), ("experts", experts)];
                wrong(&sizes, positive, "a positive number")
                    .or(wrong(
                        &[("active", active)],
                        |count| count >= 1.0 && count <= experts,
                        "at least 1 and no more than `experts`",
                    ))
                    .or(wrong(&[("shared", shared)], at_least_0, "a number of at least 0"))
            }
        }
    }
}
