//! Block attention by libtorch's operators.

use tch::{Kind, Tensor};

use super::MASKED_SCORE;
use crate::attention::{AttentionSpec, Heads, Qkv};
use crate::kv_attention::MaskKind;

/// Attention of one sequence's blocks, see [`super::BlockAttention::forward`].
///
/// `anchors` is `[A]`; the queries of `block` are `[A·B, H, D]`, its keys and values `[A·B, G, D]`. `k` and `v` of the context are
/// `[T, G, D]`. `mask` tells which slots of its own block a slot sees. Returns `[A·B, H·D]`.
pub(super) fn block_attention(
    block: &Qkv,
    k: &Tensor,
    v: &Tensor,
    anchors: &Tensor,
    (block_size, mask): (i64, MaskKind),
    spec: &AttentionSpec,
) -> Tensor {
    let AttentionSpec { heads: Heads { query, key_value, dim }, scale, window, .. } = *spec;
    let (blocks, tokens) = (anchors.size()[0], k.size()[0]);
    let wide = if block.q.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let options = (Kind::Int64, anchors.device());
    // 1. Keys that slot j of block a, at position p_a + j, sees: [A, 1, B, T + B].
    let slots = Tensor::arange(block_size, options);
    let positions = (anchors.unsqueeze(1) + &slots).unsqueeze(2); // [A, B, 1]
    let context = Tensor::arange(tokens, options).expand([blocks, block_size, tokens], false);
    let own = (anchors.unsqueeze(1) + &slots).unsqueeze(1).expand([blocks, block_size, block_size], false);
    let unseen = match mask {
        MaskKind::Block => own.lt(0),
        MaskKind::Causal => own.gt_tensor(&positions),
    };
    let mut hidden = Tensor::cat(&[context.ge_tensor(&anchors.view([-1, 1, 1])), unseen], 2);
    if let Some(window) = window {
        let keys = Tensor::cat(&[context, own], 2);
        hidden = hidden.logical_or(&keys.le_tensor(&(positions - window as i64)));
    }
    // 2. Scores of grouped heads: [A, G, H/G, B, T + B].
    let q = block
        .q
        .to_kind(wide)
        .view([blocks, block_size, key_value, query / key_value, dim])
        .permute([0, 2, 3, 1, 4]);
    let of_blocks = |x: &Tensor| {
        x.to_kind(wide).view([blocks, block_size, key_value, 1, dim]).permute([0, 2, 3, 1, 4]) // [A, G, 1, B, D]
    };
    let (own_k, own_v) = (of_blocks(&block.k), of_blocks(&block.v));
    let [k, v] = [k, v].map(|x| x.to_kind(wide).transpose(0, 1).unsqueeze(1)); // [G, 1, T, D]
    let scores =
        Tensor::cat(&[q.matmul(&k.transpose(-1, -2)), q.matmul(&own_k.transpose(-1, -2))], -1) * scale;
    let scores = scores.masked_fill(&hidden.unsqueeze(1).unsqueeze(1), MASKED_SCORE);
    // 3. Probabilities and values: [A·B, H·D]. A sink takes a share of the probability and has no value.
    let scores = match &block.sinks {
        Some(sinks) => {
            let sinks = sinks.to_kind(wide).view([1, key_value, query / key_value, 1, 1]);
            let column = [blocks, key_value, query / key_value, block_size, 1];
            Tensor::cat(&[scores, sinks.expand(column, false)], -1)
        }
        None => scores,
    };
    let probs = scores.softmax(-1, wide);
    let [by_context, by_own] = [(0, tokens), (tokens, block_size)].map(|(at, n)| probs.narrow(-1, at, n));
    let y = by_context.matmul(&v) + by_own.matmul(&own_v);
    y.permute([0, 3, 1, 2, 4]).reshape([blocks * block_size, query * dim]).to_kind(block.q.kind())
}
