//! Attention of drafters that read tokens, in training.
//!
//! Shapes: N rows, K keys, H heads, G key/value heads, D head dim.

use deepspec_models::nn::{AttentionSpec, Heads, Qkv};
use tch::{Kind, Tensor};

/// Causal attention within sequences of these lengths, `q [N, H, D]` to `[N, H·D]`.
pub fn causal_attention(spec: &AttentionSpec, lengths: &[i64], qkv: &Qkv) -> Tensor {
    CausalKeys::new(spec, lengths, [&qkv.k, &qkv.v]).attend(&qkv.q)
}

/// Keys and values of sequences, to which several sets of queries attend.
pub struct CausalKeys {
    spec: AttentionSpec,
    lengths: Vec<i64>,
    /// Keys and values of each sequence, `[1, H, T, D]`, and the additive mask `[T, T]` of a window.
    sequences: Vec<([Tensor; 2], Option<Tensor>)>,
}

impl CausalKeys {
    /// Keys and values `[N, G, D]` of sequences of these lengths, whose sum is N.
    pub fn new(spec: &AttentionSpec, lengths: &[i64], keys_values: [&Tensor; 2]) -> Self {
        let repeats = spec.heads.num_kv_groups();
        // Fused kernels of all devices take as many key heads as query heads: [1, H, T, D].
        let all_heads = |keys: Tensor| {
            let repeated =
                if repeats == 1 { keys } else { keys.repeat_interleave_self_int(repeats, 1, None) };
            repeated.transpose(0, 1).unsqueeze(0)
        };
        let [keys, values] = keys_values.map(|rows| rows.split_with_sizes(lengths, 0));
        let sequence = |(k, v): (Tensor, Tensor)| {
            let mask = window_mask(spec, &k);
            ([k, v].map(all_heads), mask)
        };
        let sequences = keys.into_iter().zip(values).map(sequence).collect();
        Self { spec: *spec, lengths: lengths.to_vec(), sequences }
    }

    /// Attention of `q [N, H, D]`, `[N, H·D]`. A query sees the keys up to its own row, or the last ones of a window.
    pub fn attend(&self, q: &Tensor) -> Tensor {
        let Heads { query, dim, .. } = self.spec.heads;
        let attend = |(q, ([k, v], mask)): (Tensor, &([Tensor; 2], Option<Tensor>))| {
            let q = q.transpose(0, 1).unsqueeze(0);
            let (mask, is_causal) = (mask.as_ref(), mask.is_none());
            let y =
                Tensor::scaled_dot_product_attention(&q, k, v, mask, 0.0, is_causal, self.spec.scale, false);
            y.squeeze_dim(0).transpose(0, 1).reshape([-1, query * dim])
        };
        let queries = q.split_with_sizes(&self.lengths, 0);
        Tensor::cat(&queries.into_iter().zip(&self.sequences).map(attend).collect::<Vec<_>>(), 0)
    }
}

/// The additive mask `[T, T]` of causal attention with a window, for keys `[T, G, D]`; None if all T keys are within the window.
fn window_mask(spec: &AttentionSpec, keys: &Tensor) -> Option<Tensor> {
    let (length, window) = (keys.size()[0], spec.window? as i64);
    (length > window).then(|| {
        let seen = Tensor::ones([length, length], (Kind::Bool, keys.device())).tril(0).triu(1 - window);
        let mask = Tensor::zeros([length, length], (keys.kind(), keys.device()));
        mask.masked_fill(&seen.logical_not(), f64::NEG_INFINITY)
    })
}

/// The additive mask of [`masked_attention`], `[H / G · N, K]` of this kind, from the pairs that do not see each other, `[N, K]`.
pub fn additive_mask(spec: &AttentionSpec, blocked: &Tensor, kind: Kind) -> Tensor {
    let mask = Tensor::zeros(blocked.size(), (kind, blocked.device()));
    mask.masked_fill(blocked, f64::NEG_INFINITY).repeat([spec.heads.num_kv_groups(), 1])
}

/// Attention of `q [N, H, D]` to keys and values `[K, G, D]`, with a mask of [`additive_mask`]: `[N, H·D]`.
pub fn masked_attention(spec: &AttentionSpec, q: &Tensor, [k, v]: [&Tensor; 2], mask: &Tensor) -> Tensor {
    let Heads { query, key_value, dim } = spec.heads;
    let (rows, repeats) = (q.size()[0], spec.heads.num_kv_groups());
    // Query heads that share a key head become further query rows: [1, G, repeats·N, D].
    let q = q.view([rows, key_value, repeats, dim]).permute([1, 2, 0, 3]);
    let q = q.reshape([1, key_value, repeats * rows, dim]);
    let [k, v] = [k, v].map(|keys| keys.transpose(0, 1).unsqueeze(0)); // [1, G, K, D]
    let y = Tensor::scaled_dot_product_attention(&q, &k, &v, Some(mask), 0.0, false, spec.scale, false);
    y.view([key_value, repeats, rows, dim]).permute([2, 0, 1, 3]).reshape([rows, query * dim])
}
