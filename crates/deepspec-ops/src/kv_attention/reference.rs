//! Attention over the KV cache by libtorch's scaled dot-product attention (SDPA).

use tch::{Kind, Tensor};

use super::calls::{MaskShape, SdpaSlice};
use super::plan::{MaskKind, PoolRowSelection, SdpaGroup};
use crate::attention::{AttentionSpec, Heads};

/// Attention of one group of chunks, which have equal lengths L: `q [S·L, H, D]` to `[S·L, H·D]`. `keys` and `values` are
/// the pools that hold the group's rows, `[rows, capacity, G, D]` each. `calls` are the SDPA calls whose rows make up a
/// chunk. `sinks` is `[H]`; SDPA has none, so products and a softmax replace it.
pub(super) fn kv_attention(
    q: &Tensor,
    [keys, values]: [&Tensor; 2],
    group: &SdpaGroup,
    calls: &[SdpaSlice],
    spec: &AttentionSpec,
    visibility: MaskKind,
    sinks: Option<&Tensor>,
) -> Tensor {
    let AttentionSpec { heads: Heads { query, key_value, dim }, scale, window, .. } = *spec;
    let (repeats, kind) = (query / key_value, keys.kind());
    let shape = MaskShape { repeats: repeats as usize, window };
    let q = q.view([-1, group.width, key_value, repeats, dim]).permute([0, 2, 3, 1, 4]);
    let attend = |call: &SdpaSlice| {
        let rows = (call.rows.end - call.rows.start) as i64;
        // 1. The query heads that share keys become further queries: [S, G, repeats·L, D].
        let q = q.narrow(3, call.rows.start as i64, rows).reshape([-1, key_value, repeats * rows, dim]);
        // 2. Keys and values of the sequences: [S, G, keys, D].
        let (first, count) = (call.keys.start as i64, (call.keys.end - call.keys.start) as i64);
        let of_sequences = |pool: &Tensor| {
            match &group.slots {
                PoolRowSelection::Range(slot, slots) => pool.narrow(0, *slot, *slots).narrow(1, first, count),
                PoolRowSelection::Indices(slots) => pool.narrow(1, first, count).index_select(0, slots),
            }
            .transpose(1, 2)
        };
        let (k, v) = (of_sequences(keys), of_sequences(values));
        // 3. Attention with the mask: [S, L, G, repeats, D].
        let mask = group.call_mask(call, &shape, visibility, kind);
        let y = match sinks {
            Some(sinks) => {
                let by_head = sinks.view([1, key_value, repeats, 1, 1]);
                let by_row = by_head.expand([1, key_value, repeats, rows, 1], false);
                attend_with_sinks(&q, (&k, &v), &mask, scale, &by_row.reshape([1, key_value, -1, 1]))
            }
            None => Tensor::scaled_dot_product_attention(&q, &k, &v, Some(&mask), 0.0, false, scale, false),
        };
        y.view([-1, key_value, repeats, rows, dim]).permute([0, 3, 1, 2, 4])
    };
    let outputs: Vec<Tensor> = calls.iter().map(attend).collect();
    let y = if let [only] = outputs.as_slice() { only.shallow_clone() } else { Tensor::cat(&outputs, 1) };
    y.reshape([-1, query * dim])
}

/// Attention of `q [S, G, R, D]` over keys and values `[S, G, K, D]` with an additive mask. The sinks `[1, G, R, 1]` are further
/// scores, whose share of the probability is dropped.
fn attend_with_sinks(
    q: &Tensor,
    (k, v): (&Tensor, &Tensor),
    mask: &Tensor,
    scale: f64,
    sinks: &Tensor,
) -> Tensor {
    let wide = if q.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    // Products of bfloat16 would round the scores.
    let scores = q.to_kind(wide).matmul(&k.to_kind(wide).transpose(-1, -2)) * scale + mask;
    let mut column = scores.size();
    let keys = std::mem::replace(&mut column[3], 1);
    let all = Tensor::cat(&[scores, sinks.to_kind(wide).expand(column, false)], -1);
    all.softmax(-1, wide).narrow(-1, 0, keys).to_kind(v.kind()).matmul(v)
}
