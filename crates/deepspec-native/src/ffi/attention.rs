//! Attention of blocks behind anchors, with a backward of its own: tch has no way to write one.

use std::ffi::{c_char, c_void};
use std::ops::Range;
use std::ptr;

use tch::Tensor;

use super::c10d::check;
use super::rows::owned;

/// Queries of neighbouring rows and the keys that they attend to.
pub struct AttentionPart {
    /// Rows of the queries, all blocks' one after the other.
    pub rows: Range<i64>,
    /// Keys of the context, not none.
    pub keys: Range<i64>,
    /// Added to the scores, `[1, 1, rows, keys]`; none where all keys are seen by all rows. What is hidden has a very low number
    /// instead of −∞, so that rows which see nothing of the part have a log-sum-exp.
    pub mask: Option<Tensor>,
}

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
        scale: f64,
        out: *mut *mut c_void,
    ) -> *mut c_char;
}

unsafe extern "C" {
    fn ds_attends_by_block() -> bool;
    fn ds_attend_by_block(
        q: *const c_void,
        k: *const c_void,
        v: *const c_void,
        own_k: *const c_void,
        own_v: *const c_void,
        anchors: *const i64,
        count: usize,
        window: i64,
        scale: f64,
        out: *mut *mut c_void,
    ) -> *mut c_char;
}

/// Keys and values of a context, `[G, T, D]`, or of the blocks themselves, `[G, A, B, D]`.
pub struct KeysValues<'a> {
    /// Keys.
    pub k: &'a Tensor,
    /// Values.
    pub v: &'a Tensor,
}

/// Attention of `q [G, A, r, D]`, A blocks of r queries: each block over its own keys, and each row over those of the context that
/// `parts` give it. Rows and keys that no part names do not see each other. Gives `[G, A, r, D]`, with gradients for all five.
///
/// On the CPU libtorch's fused kernels do the parts, elsewhere plain products of each.
///
/// # Panics
/// With libtorch's words, if shapes, kinds or devices do not fit each other.
pub fn block_attention(
    q: &Tensor,
    context: &KeysValues<'_>,
    own: &KeysValues<'_>,
    parts: &[AttentionPart],
    block_mask: Option<&Tensor>,
    scale: f64,
) -> Tensor {
    let pointer = |mask: Option<&Tensor>| mask.map_or(ptr::null(), |mask| mask.as_ptr().cast());
    let raw: Vec<RawPart> = parts
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
    let (parts, mask, mut out) = (raw.as_ptr(), pointer(block_mask), ptr::null_mut());
    // SAFETY: the shim takes counted references to all tensors, which outlive the call, and reads as many parts as there are; it catches
    // every C++ exception, and sets `out` where it returns null.
    let outcome =
        check(unsafe { ds_block_attention(q, k, v, own_k, own_v, parts, raw.len(), mask, scale, &mut out) });
    if let Err(problem) = outcome {
        panic!("attention of blocks: {problem}");
    }
    // SAFETY: without an error it is a tensor from `new` that belongs to nobody else; tch frees it by `delete`.
    unsafe { Tensor::from_ptr(out.cast()) }
}

/// Whether [`attend_by_block`] is the better choice for float32 on this CPU.
pub fn attends_by_block() -> bool {
    // SAFETY: it only asks the processor.
    unsafe { ds_attends_by_block() }
}

/// The attention of [`block_attention`] where each block sees the context before its anchor, and slots see keys behind their position less `window`, where
/// there is one: `q [G, A, r, D]` holds all slots of a block for one query head after the other.
///
/// None where there are no such kernels: on other devices, of other kinds, where D is no multiple of 16, and on processors without AVX2.
///
/// # Panics
/// If shapes do not fit each other, or an anchor lies behind the context.
pub fn attend_by_block(
    q: &Tensor,
    context: &KeysValues<'_>,
    own: &KeysValues<'_>,
    anchors: &[i64],
    window: Option<i64>,
    scale: f64,
) -> Option<Tensor> {
    let [q, k, v, own_k, own_v] =
        [q, context.k, context.v, own.k, own.v].map(|tensor| tensor.as_ptr().cast());
    let (window, mut out) = (window.unwrap_or(i64::MAX), ptr::null_mut());
    // SAFETY: the shim takes counted references to all tensors and copies the anchors, of which there are as many as it is told; it checks kinds, shapes,
    // strides and anchors, catches every C++ exception, and sets `out` where it returns null.
    let outcome = check(unsafe {
        ds_attend_by_block(q, k, v, own_k, own_v, anchors.as_ptr(), anchors.len(), window, scale, &mut out)
    });
    if let Err(problem) = outcome {
        panic!("attention of blocks: {problem}");
    }
    // SAFETY: it is null or a tensor from `new` that belongs to nobody else.
    unsafe { owned(out) }
}
