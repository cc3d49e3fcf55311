//! Straightforward block attention: every query against every key, with a mask, differentiated by
//! autograd.

use deepspec_models::nn::{AttentionSpec, Qkv};
use deepspec_ops::BlockShape;
use deepspec_ops::kv_attention::MaskKind;
use tch::{Kind, Tensor};

/// All keys and values, `[H, T + A·B, D]`, and a mask of the visible ones for each query of blocks
/// of this shape after `anchors [A]`.
pub fn seen(
    spec: &AttentionSpec,
    shape: BlockShape,
    anchors: &Tensor,
    block: &Qkv,
    k: &Tensor,
    v: &Tensor,
) -> [Tensor; 3] {
    let (context, rows, size) = (k.size()[0], block.q.size()[0], shape.size as i64);
    let options = (Kind::Int64, k.device());
    let row = Tensor::arange(rows, options).unsqueeze(1); // block-major
    let of_row = row.divide_scalar_mode(size, "floor");
    let anchor = anchors.index_select(0, &of_row.view([-1])).unsqueeze(1);
    let position = &anchor + row.remainder(size);
    let keys = Tensor::arange(context, options);
    let mut own = of_row.tr().eq_tensor(&of_row);
    if shape.mask == MaskKind::Causal {
        own = own.logical_and(&row.tr().le_tensor(&row));
    }
    let mut seen = Tensor::cat(&[keys.lt_tensor(&anchor), own], 1);
    if let Some(window) = spec.window {
        let own = position.tr().expand([rows, rows], false);
        let keys = Tensor::cat(&[keys.expand([rows, context], false), own], 1);
        seen = seen.logical_and(&keys.gt_tensor(&(&position - window as i64)));
    }
    let all = |own: &Tensor, context: &Tensor| {
        let heads = Tensor::cat(&[context, own], 0).transpose(0, 1);
        heads.repeat_interleave_self_int(spec.heads.num_kv_groups(), 0, None)
    };
    [all(&block.k, k), all(&block.v, v), seen]
}

/// Computes the same as `BlockAttention::forward`.
pub fn dense_attention(
    spec: &AttentionSpec,
    shape: BlockShape,
    anchors: &Tensor,
    block: &Qkv,
    k: &Tensor,
    v: &Tensor,
) -> Tensor {
    let [k, v, seen] = seen(spec, shape, anchors, block, k, v);
    let scores = block.q.transpose(0, 1).bmm(&k.transpose(1, 2)) * spec.scale;
    let weights = scores.masked_fill(&seen.logical_not(), f64::NEG_INFINITY).softmax(-1, None);
    weights.bmm(&v).transpose(0, 1).reshape([block.q.size()[0], -1])
}
