//! Attention of draft blocks to the context and to themselves. Its backward pass is written in C++, because tch cannot define one.

use std::ffi::{c_char, c_void};
use std::ptr::{self, NonNull};

use tch::{Kind, Tensor};

use super::super::args::{BlockMasks, KeyValues, SequenceBlocks, TiledBlocks};
use super::super::c10d::check;
use super::super::tensor_from_raw;

#[repr(C)]
struct RawPart {
    first_row: i64,
    rows: i64,
    first_key: i64,
    keys: i64,
    mask: *const c_void,
}

unsafe extern "C" {
    fn ds_block_attention(
        q: *const c_void,
        k: *const c_void,
        v: *const c_void,
        own_k: *const c_void,
        own_v: *const c_void,
        parts: *const RawPart,
        count: usize,
        block_mask: *const c_void,
        sinks: *const c_void,
        scale: f64,
        out: *mut *mut c_void,
    ) -> *mut c_char;
}

unsafe extern "C" {
    fn ds_attends_by_block(dim: i64) -> bool;
    fn ds_attend_by_block(
        q: *const c_void,
        k: *const c_void,
        v: *const c_void,
        own_k: *const c_void,
        own_v: *const c_void,
        sequences: *const RawSequence,
        count: usize,
        anchors: *const i64,
        window: i64,
        scale: f64,
        out: *mut *mut c_void,
    ) -> *mut c_char;
}

/// Attention of `q [G, A, r, D]`, which are A blocks of r query rows. Each block attends to its own keys
/// `[G, A, B, D]`. Each row also attends to the context keys, of `[G, T, D]`, that `parts` list for it. Returns `[G, A, r, D]`;
/// all tensors get gradients. `sinks` are further scores of each row of a block, `[G, 1, r]`, without a value.
///
/// libtorch's fused kernels compute the parts on the CPU, and matmuls elsewhere.
///
/// # Panics
/// With libtorch's message, if shapes, dtypes or devices do not match.
pub fn block_attention(
    q: &Tensor,
    context: &KeyValues<'_>,
    own: &KeyValues<'_>,
    masks: &BlockMasks<'_>,
    sinks: Option<&Tensor>,
    scale: f64,
) -> Option<Tensor> {
    let pointer = |mask: Option<&Tensor>| mask.map_or(ptr::null(), |mask| mask.as_ptr().cast());
    let raw: Vec<RawPart> = masks
        .parts
        .iter()
        .map(|part| RawPart {
            first_row: part.rows.start,
            rows: part.rows.end - part.rows.start,
            first_key: part.keys.start,
            keys: part.keys.end - part.keys.start,
            mask: pointer(part.mask.as_ref()),
        })
        .collect();
    let [q, k, v, own_k, own_v] =
        [q, context.k, context.v, own.k, own.v].map(|tensor| tensor.as_ptr().cast());
    let (parts, mask, mut out) = (raw.as_ptr(), pointer(masks.own), ptr::null_mut());
    let (count, sinks) = (raw.len(), pointer(sinks));
    // SAFETY: the shim takes counted references to all tensors, which outlive the call, and reads `raw.len()` parts.
    // It catches every C++ exception, and sets `out` if it returns null.
    let outcome = check(unsafe {
        ds_block_attention(q, k, v, own_k, own_v, parts, count, mask, sinks, scale, &mut out)
    });
    if let Err(problem) = outcome {
        panic!("attention of blocks: {problem}");
    }
    // SAFETY: without an error, `out` is a tensor from `new` that nobody else owns; tch frees it by `delete`.
    Some(unsafe { Tensor::from_ptr(out.cast()) })
}

/// Whether [`attend_by_block`] is the faster choice for float32 heads of `dim` values on this CPU.
pub fn has_block_attention(dim: i64) -> bool {
    // SAFETY: the shim only queries the processor.
    unsafe { ds_attends_by_block(dim) }
}

#[repr(C)]
struct RawSequence {
    blocks: i64,
    tokens: i64,
}

/// [`block_attention`] where each block sees its sequence's context before its anchor. With a window, the query at
/// position p sees only keys at positions above p − `window`. Rows of the sequences follow one another. `q` is
/// `[A·B, H, D]`, `own` is `[A·B, G, D]` and `context` is `[T, G, D]`. Returns `[A·B, H·D]`; all five tensors get gradients.
///
/// Returns None if the tensors are not float32 on the CPU, if D is not a multiple of 16, and without AVX2.
///
/// # Panics
/// If shapes do not match, or an anchor exceeds its context.
pub fn attend_by_block(
    q: &Tensor,
    context: &KeyValues<'_>,
    own: &KeyValues<'_>,
    sequences: &[SequenceBlocks],
    window: Option<i64>,
    scale: f64,
) -> Option<Tensor> {
    let [q, k, v, own_k, own_v] =
        [q, context.k, context.v, own.k, own.v].map(|tensor| tensor.as_ptr().cast());
    let raw = |of: &SequenceBlocks| RawSequence { blocks: of.anchors.len() as i64, tokens: of.tokens };
    let raw: Vec<RawSequence> = sequences.iter().map(raw).collect();
    let anchors: Vec<i64> = sequences.iter().flat_map(|of| of.anchors.iter().copied()).collect();
    let (window, mut out) = (window.unwrap_or(i64::MAX), ptr::null_mut());
    // SAFETY: the shim takes counted references to all tensors, and copies `count` sequences and their anchors. It
    // checks dtypes, shapes and anchors, catches every C++ exception, and sets `out` if it returns null.
    let outcome = check(unsafe {
        let (sequences, count) = (raw.as_ptr(), raw.len());
        ds_attend_by_block(q, k, v, own_k, own_v, sequences, count, anchors.as_ptr(), window, scale, &mut out)
    });
    if let Err(problem) = outcome {
        panic!("attention of blocks: {problem}");
    }
    // SAFETY: `out` is null or a tensor from `new` that nobody else owns.
    unsafe { tensor_from_raw(out) }
}

/// The shim's plan.
#[repr(C)]
struct RawPlan([u8; 0]);

unsafe extern "C" {
    fn ds_attends_in_tiles(like: *const c_void, dim: i64) -> bool;
    fn ds_tiled_plan(numbers: *const c_void, of: *const TiledBlocks, out: *mut *mut RawPlan) -> *mut c_char;
    fn ds_tiled_plan_free(plan: *mut RawPlan);
    fn ds_attend_in_tiles(
        q: *const c_void,
        k: *const c_void,
        v: *const c_void,
        own_k: *const c_void,
        own_v: *const c_void,
        plan: *mut RawPlan,
        out: *mut *mut c_void,
    ) -> *mut c_char;
}

/// Whether [`TiledAttention`] supports heads of `dim` values of this dtype on the device of `like`.
pub fn has_tiled_attention(like: &Tensor, kind: Kind, dim: i64) -> bool {
    // SAFETY: the shim reads the tensor's device, and catches every C++ exception.
    kind == Kind::BFloat16 && unsafe { ds_attends_in_tiles(like.as_ptr().cast(), dim) }
}

/// [`block_attention`] in bfloat16 on a GPU, where each block of a sequence sees the context before its anchor.
pub struct TiledAttention(NonNull<RawPlan>);

impl TiledAttention {
    /// A plan for all layers of one shape. `numbers` is the GPU tensor of indices that [`TiledBlocks`] describes.
    ///
    /// # Panics
    /// If `numbers` has another length or dtype, or with the driver's message.
    pub fn new(numbers: &Tensor, blocks: &TiledBlocks) -> Self {
        let mut plan = ptr::null_mut();
        // SAFETY: the shim reads the struct and keeps a counted reference to the tensor. It catches every C++
        // exception, and sets `plan` if it returns null.
        if let Err(problem) = check(unsafe { ds_tiled_plan(numbers.as_ptr().cast(), blocks, &mut plan) }) {
            panic!("attention in tiles: {problem}");
        }
        Self(NonNull::new(plan).expect("a plan without an error"))
    }

    /// Attention of block queries `[A·B, H, D]` over context keys `[T, G, D]` and block keys `[A·B, G, D]`. Returns
    /// `[A·B, H·D]`; all five tensors get gradients.
    ///
    /// # Panics
    /// If shapes do not match the plan, or with libtorch's message.
    pub fn attend(&self, q: &Tensor, context: &KeyValues<'_>, own: &KeyValues<'_>) -> Tensor {
        let [q, k, v, own_k, own_v] =
            [q, context.k, context.v, own.k, own.v].map(|tensor| tensor.as_ptr().cast());
        let mut out = ptr::null_mut();
        // SAFETY: the plan is live, and the graph takes its own counted reference. The shim takes counted references
        // to all tensors and checks shapes. It catches every C++ exception, and sets `out` if it returns null.
        let outcome = check(unsafe { ds_attend_in_tiles(q, k, v, own_k, own_v, self.0.as_ptr(), &mut out) });
        if let Err(problem) = outcome {
            panic!("attention in tiles: {problem}");
        }
        // SAFETY: without an error, `out` is a tensor from `new` that nobody else owns; tch frees it by `delete`.
        unsafe { Tensor::from_ptr(out.cast()) }
    }
}

impl Drop for TiledAttention {
    fn drop(&mut self) {
        // SAFETY: the plan came from the shim, and only this call releases this reference.
        unsafe { ds_tiled_plan_free(self.0.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::super::super::args::AttentionPart;
    use super::*;

    fn values(shape: &[i64], seed: f64) -> Tensor {
        let count = shape.iter().product::<i64>();
        ((Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.731 + seed).sin() * 37.0).sin().view(shape)
    }

    /// Output and gradients of `attend` for two KV heads with three query heads each; rows as in [`attend_by_block`].
    fn run(
        blocks: i64,
        size: i64,
        tokens: i64,
        dim: i64,
        attend: impl Fn(&Tensor, &KeyValues<'_>, &KeyValues<'_>) -> Tensor,
    ) -> Vec<Tensor> {
        let learned = |shape: &[i64], seed| values(shape, seed).set_requires_grad(true);
        let q = learned(&[blocks * size, 6, dim], 0.1);
        let [own_k, own_v] = [0.2, 0.3].map(|seed| learned(&[blocks * size, 2, dim], seed));
        let [k, v] = [0.4, 0.5].map(|seed| learned(&[tokens, 2, dim], seed));
        let y = attend(&q, &KeyValues { k: &k, v: &v }, &KeyValues { k: &own_k, v: &own_v });
        (&y * values(&y.size(), 0.6)).sum(Kind::Float).backward();
        [y.detach()].into_iter().chain([q, own_k, own_v, k, v].map(|tensor| tensor.grad())).collect()
    }

    /// The attention of one sequence by [`block_attention`].
    fn by_parts(
        (q, context, own): (&Tensor, &KeyValues<'_>, &KeyValues<'_>),
        size: i64,
        masks: &BlockMasks<'_>,
    ) -> Tensor {
        let dim = q.size()[2];
        let rows = q.view([-1, size, 2, 3, dim]).permute([2, 0, 3, 1, 4]).reshape([2, -1, 3 * size, dim]);
        let [own_k, own_v] = [own.k, own.v].map(|own| own.view([-1, size, 2, dim]).permute([2, 0, 1, 3]));
        let (k, v) = (context.k.transpose(0, 1), context.v.transpose(0, 1));
        let (context, own) = (KeyValues { k: &k, v: &v }, KeyValues { k: &own_k, v: &own_v });
        let y = block_attention(&rows, &context, &own, masks, None, 0.2).unwrap();
        y.view([2, -1, 3, size, dim]).permute([1, 3, 0, 2, 4]).reshape([-1, 6 * dim])
    }

    /// Additive masks of the context and of the own block, for each slot.
    fn masks(anchors: &[i64], size: i64, tokens: i64, window: Option<i64>) -> (Tensor, Tensor) {
        let added = |is_seen: bool| if is_seen { 0.0f32 } else { -1e30 };
        let window = window.unwrap_or(i64::MAX);
        let slots = || (0..3).flat_map(|_| 0..size);
        let context: Vec<f32> = anchors
            .iter()
            .flat_map(|&anchor| slots().map(move |slot| (anchor, anchor + slot)))
            .flat_map(|(anchor, at)| (0..tokens).map(move |key| added(key < anchor && at - key < window)))
            .collect();
        let own: Vec<f32> =
            slots().flat_map(|slot| (0..size).map(move |key| added(slot - key < window))).collect();
        let rows = anchors.len() as i64 * 3 * size;
        (
            Tensor::from_slice(&context).view([1, 1, rows, tokens]),
            Tensor::from_slice(&own).view([1, 1, 3 * size, size]),
        )
    }

    #[test]
    fn block_by_block_it_is_that_of_parts() {
        // Blocks of whole panels and of partial ones; anchors at the ends and out of order.
        for (size, dim) in [(7, 48), (16, 16), (17, 32)] {
            for window in [None, Some(1), Some(5), Some(33), Some(1000)] {
                let (anchors, tokens) = ([0, 3, 64, 17, 16, 70], 70);
                let (context_mask, own_mask) = masks(&anchors, size, tokens, window);
                let blocks = anchors.len() as i64;
                let part =
                    AttentionPart { rows: 0..blocks * 3 * size, keys: 0..tokens, mask: Some(context_mask) };
                let masks = BlockMasks { parts: &[part], own: Some(&own_mask) };
                let expected = run(blocks, size, tokens, dim, |q, context, own| {
                    by_parts((q, context, own), size, &masks)
                });
                let sequences = [SequenceBlocks { tokens, anchors: anchors.to_vec() }];
                let found = run(blocks, size, tokens, dim, |q, context, own| {
                    attend_by_block(q, context, own, &sequences, window, 0.2)
                        .expect("this processor has no AVX2")
                });
                for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let off = (found - expected).abs().max().double_value(&[]);
                    let most = expected.abs().max().double_value(&[]).max(1e-3);
                    assert!(off <= 5e-6 * most, "{i}: {off:e} of {most}, size {size}, window {window:?}");
                }
            }
        }
    }

    #[test]
    fn threads_change_no_bit_of_it() {
        let before = tch::get_num_threads();
        let of = |tokens: i64, blocks: i64| SequenceBlocks {
            tokens,
            anchors: (0..blocks).map(|i| i * 3).collect(),
        };
        let sequences = [of(90, 30), of(40, 10)];
        let [one, three] = [1, 3].map(|threads| {
            tch::set_num_threads(threads);
            run(40, 7, 130, 48, |q, context, own| {
                attend_by_block(q, context, own, &sequences, None, 0.2).unwrap()
            })
        });
        tch::set_num_threads(before);
        assert!(one.iter().zip(&three).all(|(one, three)| one.equal(three)));
    }

    #[test]
    fn sequences_do_not_see_each_other() {
        let sequences = [(20, vec![0, 7, 20]), (33, vec![5, 33])];
        let sequences = sequences.map(|(tokens, anchors)| SequenceBlocks { tokens, anchors });
        let all = run(5, 7, 53, 16, |q, context, own| {
            attend_by_block(q, context, own, &sequences, Some(9), 0.2).unwrap()
        });
        let separate = run(5, 7, 53, 16, |q, context, own| {
            let (mut block, mut token) = (0, 0);
            let of = sequences.iter().map(|of| {
                let (rows, tokens) = (of.anchors.len() as i64 * 7, of.tokens);
                let [q, own_k, own_v] = [q, own.k, own.v].map(|tensor| tensor.narrow(0, block, rows));
                let [k, v] = [context.k, context.v].map(|tensor| tensor.narrow(0, token, tokens));
                (block, token) = (block + rows, token + tokens);
                let (context, own) = (KeyValues { k: &k, v: &v }, KeyValues { k: &own_k, v: &own_v });
                attend_by_block(&q, &context, &own, std::slice::from_ref(of), Some(9), 0.2).unwrap()
            });
            Tensor::cat(&of.collect::<Vec<_>>(), 0)
        });
        assert!(all.iter().zip(&separate).all(|(all, separate)| all.equal(separate)));
    }

    fn lone(tokens: i64, anchors: &[i64]) -> [SequenceBlocks; 1] {
        [SequenceBlocks { tokens, anchors: anchors.to_vec() }]
    }

    #[test]
    fn other_kinds_and_widths_are_not_attended_to_block_by_block() {
        let of = |kind, dim| {
            let q = values(&[4, 2, dim], 0.0).to_kind(kind);
            let (k, own) = (values(&[9, 1, dim], 0.1).to_kind(kind), values(&[4, 1, dim], 0.2).to_kind(kind));
            let (context, own) = (KeyValues { k: &k, v: &k }, KeyValues { k: &own, v: &own });
            attend_by_block(&q, &context, &own, &lone(9, &[3, 9]), None, 1.0)
        };
        assert!(of(Kind::Float, 16).is_some());
        assert!(of(Kind::Float, 24).is_none() && of(Kind::BFloat16, 16).is_none());
    }

    #[test]
    #[should_panic(expected = "an anchor behind the context")]
    fn an_anchor_behind_the_context_is_refused() {
        let (q, k) = (values(&[2, 2, 16], 0.0), values(&[9, 1, 16], 0.1));
        let own = values(&[2, 1, 16], 0.2);
        let (context, own) = (KeyValues { k: &k, v: &k }, KeyValues { k: &own, v: &own });
        let _ = attend_by_block(&q, &context, &own, &lone(9, &[10]), None, 1.0);
    }
}
