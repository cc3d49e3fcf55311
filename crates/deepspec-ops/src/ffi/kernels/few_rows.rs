//! Target layers for a few bfloat16 rows on a GPU: a few kernels per layer, which read every weight once.

use std::ffi::{c_char, c_void};
use std::ptr;

use tch::Tensor;

use super::super::args::{KvChunk, KvWindow, ProjectedHeads, RmsNormParams};
use super::super::c10d::check;
use super::in_place_attention::RawChunk;

#[repr(C)]
struct RawHeads {
    query_gain: *const c_void,
    key_gain: *const c_void,
    cosines: *const c_void,
    sines: *const c_void,
    query: i64,
    key_value: i64,
    dim: i64,
    window: i64,
    eps: f64,
    scale: f64,
    sees_chunk: bool,
}

unsafe extern "C" {
    fn ds_has_few_rows(like: *const c_void, width: i64, inner: i64, dim: i64, repeats: i64) -> bool;
    fn ds_few_rows_product(
        x: *const c_void,
        gain: *const c_void,
        eps: f64,
        weights: *const *const c_void,
        count: usize,
        residual: *const c_void,
        out: *mut *mut c_void,
    ) -> *mut c_char;
    fn ds_few_rows_gated_product(
        x: *const c_void,
        gain: *const c_void,
        eps: f64,
        gate: *const c_void,
        up: *const c_void,
        out: *mut *mut c_void,
    ) -> *mut c_char;
    fn ds_few_rows_attention(
        qkv: *const c_void,
        heads: *const RawHeads,
        chunks: *const RawChunk,
        count: usize,
        out: *mut *mut c_void,
    ) -> *mut c_char;
}

/// Whether kernels exist for such layers on the device of `like`. Rows have `width` values, the MLP `inner` and heads
/// `dim`; `repeats` query heads share a KV head.
pub fn has_decode_kernels(like: &Tensor, width: i64, inner: i64, dim: i64, repeats: i64) -> bool {
    // SAFETY: the shim reads the tensor's device, and catches every C++ exception.
    unsafe { ds_has_few_rows(like.as_ptr().cast(), width, inner, dim, repeats) }
}

/// `norm(x) [W₁; W₂; W₃]ᵀ + residual` for up to 8 rows `x [N, I]` and up to three weights `[Oᵢ, I]`. The outputs of
/// the weights are concatenated. Sums are float32 and rounded once. Autograd records nothing.
///
/// # Panics
/// If shapes, dtypes or devices do not match, or with the driver's message.
pub fn decode_product(
    x: &Tensor,
    gain: Option<RmsNormParams<'_>>,
    weights: &[&Tensor],
    residual: Option<&Tensor>,
) -> Tensor {
    let weights: Vec<*const c_void> = weights.iter().map(|weight| weight.as_ptr().cast()).collect();
    let (norm, eps) = norm_pointer(gain);
    let residual = residual.map_or(ptr::null(), |residual| residual.as_ptr().cast());
    let mut out = ptr::null_mut();
    // SAFETY: the tensors outlive the call, and libtorch does not reuse their memory before the stream is done with
    // them. The shim checks all shapes and reads `weights.len()` weights. It catches every C++ exception, and sets
    // `out` if it returns null.
    let problem = unsafe {
        ds_few_rows_product(x.as_ptr().cast(), norm, eps, weights.as_ptr(), weights.len(), residual, &mut out)
    };
    tensor_or_panic("a product of a few rows", problem, out)
}

/// `silu(norm(x) Wᵍᵀ) ⊙ (norm(x) Wᵘᵀ)` for up to 8 rows `x [N, I]` and weights `[O, I]`.
///
/// # Panics
/// As [`decode_product`].
pub fn decode_gated_product(x: &Tensor, gain: RmsNormParams<'_>, gate: &Tensor, up: &Tensor) -> Tensor {
    let (norm, eps) = norm_pointer(Some(gain));
    let mut out = ptr::null_mut();
    // SAFETY: as above.
    let problem = unsafe {
        ds_few_rows_gated_product(
            x.as_ptr().cast(),
            norm,
            eps,
            gate.as_ptr().cast(),
            up.as_ptr().cast(),
            &mut out,
        )
    };
    tensor_or_panic("a gated product of a few rows", problem, out)
}

/// `in_place_attention` for `qkv [N, (H + 2G)·D]`, up to 8 rows that are neither normed nor rotated. Every row
/// belongs to a chunk. Returns `[N, H·D]`.
///
/// # Panics
/// As [`decode_product`], and if two chunks share a row of a pool.
pub fn decode_attention(
    qkv: &Tensor,
    heads: &ProjectedHeads<'_>,
    chunks: &[KvChunk<'_>],
    KvWindow { scale, window, sees_chunk }: KvWindow,
) -> Tensor {
    for (at, one) in chunks.iter().enumerate() {
        let is_shared =
            |other: &KvChunk<'_>| other.row == one.row && other.pool[0].data_ptr() == one.pool[0].data_ptr();
        assert!(!chunks[..at].iter().any(is_shared), "two chunks share a row of a pool");
    }
    let raw: Vec<RawChunk> = chunks.iter().map(RawChunk::of).collect();
    let ProjectedHeads { query, key_value, dim, gains, angles } = *heads;
    let [(query_gain, eps), (key_gain, _)] = [0, 1].map(|of| norm_pointer(gains.map(|gains| gains[of])));
    let [cosines, sines] = angles.map(|angles| angles.as_ptr().cast());
    // 0 means no window. No KV cache is as long as a window that exceeds an i32.
    let window = window.map_or(0, |window| i32::try_from(window).map_or(0, i64::from));
    let heads = RawHeads {
        query_gain,
        key_gain,
        cosines,
        sines,
        query,
        key_value,
        dim,
        window,
        eps,
        scale,
        sees_chunk,
    };
    let mut out = ptr::null_mut();
    // SAFETY: as above. The shim checks the pool rows and positions that it writes, which the caller owns.
    let problem =
        unsafe { ds_few_rows_attention(qkv.as_ptr().cast(), &heads, raw.as_ptr(), raw.len(), &mut out) };
    tensor_or_panic("attention of a few rows", problem, out)
}

fn norm_pointer(gain: Option<RmsNormParams<'_>>) -> (*const c_void, f64) {
    gain.map_or((ptr::null(), 0.0), |gain| (gain.weights.as_ptr().cast(), gain.eps))
}

#[track_caller]
fn tensor_or_panic(what: &str, problem: *mut c_char, out: *mut c_void) -> Tensor {
    if let Err(problem) = check(problem) {
        panic!("{what}: {problem}");
    }
    // SAFETY: without an error, `out` is a tensor from `new` that nobody else owns; tch frees it by `delete`.
    unsafe { Tensor::from_ptr(out.cast()) }
}
