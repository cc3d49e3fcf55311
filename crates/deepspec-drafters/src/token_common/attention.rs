//! Attention of drafters that read tokens, in training.
//!
//! Shapes: N rows, K keys, H heads, G key/value heads, D head dim.

use deepspec_models::nn::{AttentionSpec, Heads, Qkv};
use tch::{Kind, Tensor};

/// Causal attention within sequences of these lengths, `q [N, H, D]` to `[N, H·D]`.
pub fn causal_attention(spec: &AttentionSpec, lengths: &[i64], qkv: &Qkv) -> Tensor {
    let Heads { query, dim, .. } = spec.heads;
    let repeats = spec.heads.num_kv_groups();
    let by_sequence = |rows: &Tensor| rows.split_with_sizes(lengths, 0);
    // Fused kernels of all devices take as many key heads as query heads: [1, H, T, D].
    let all_heads = |keys: &Tensor| {
        let repeated = if repeats == 1 {
            keys.shallow_clone()
        } else {
            keys.repeat_interleave_self_int(repeats, 1, None)
        };
        repeated.transpose(0, 1).unsqueeze(0)
    };
    let [q, k, v] = [&qkv.q, &qkv.k, &qkv.v].map(by_sequence);
    let attend = |((q, k), v): ((&Tensor, &Tensor), &Tensor)| {
        let q = q.transpose(0, 1).unsqueeze(0);
        let (k, v, none) = (all_heads(k), all_heads(v), None::<&Tensor>);
        let y = Tensor::scaled_dot_product_attention(&q, &k, &v, none, 0.0, true, spec.scale, false);
        y.squeeze_dim(0).transpose(0, 1).reshape([-1, query * dim])
    };
    Tensor::cat(&q.iter().zip(&k).zip(&v).map(attend).collect::<Vec<_>>(), 0)
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
