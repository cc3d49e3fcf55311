//! Attention over the KV cache by libtorch's scaled dot-product attention (SDPA).

use tch::Tensor;

use super::calls::{MaskShape, SdpaSlice};
use super::plan::{MaskKind, PoolRowSelection, SdpaGroup};
use crate::attention::{AttentionSpec, Heads};

/// Attention of one group of chunks, which have equal lengths L: `q [S·L, H, D]` to `[S·L, H·D]`. `keys` and `values` are
/// the pools that hold the group's rows, `[rows, capacity, G, D]` each. `calls` are the SDPA calls whose rows make up a
/// chunk.
pub(super) fn kv_attention(
    q: &Tensor,
    [keys, values]: [&Tensor; 2],
    group: &SdpaGroup,
    calls: &[SdpaSlice],
    spec: &AttentionSpec,
    visibility: MaskKind,
) -> Tensor {
    let AttentionSpec { heads: Heads { query, key_value, dim }, scale, window } = *spec;
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
        let y = Tensor::scaled_dot_product_attention(&q, &k, &v, Some(&mask), 0.0, false, scale, false);
        y.view([-1, key_value, repeats, rows, dim]).permute([0, 3, 1, 2, 4])
    };
    let outputs: Vec<Tensor> = calls.iter().map(attend).collect();
    let y = if let [only] = outputs.as_slice() { only.shallow_clone() } else { Tensor::cat(&outputs, 1) };
    y.reshape([-1, query * dim])
}
