//! Layers of a target for a few rows of bfloat16 on a GPU, each in a handful of kernels that read every weight once.

use std::ffi::{c_char, c_void};
use std::ptr;

use tch::Tensor;

use super::c10d::check;
use super::history::{HistoryChunk, HistoryView};

/// Most rows of a call. A row's bits do not depend on the rows beside it.
pub const FEW_ROWS: usize = 8;

#[repr(C)]
struct RawChunk {
    keys: *const c_void,
    values: *const c_void,
    row: i64,
    past: i64,
    len: i64,
    first: i64,
}

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

/// The weights `[width]` and ε of an RMS norm.
#[derive(Clone, Copy)]
pub struct Gain<'a> {
    /// Its weights.
    pub weights: &'a Tensor,
    /// Its ε.
    pub eps: f64,
}

/// What [`few_rows_attention`] does to queries and keys before it attends.
#[derive(Clone, Copy)]
pub struct FewRowsHeads<'a> {
    /// H, heads of queries.
    pub query: i64,
    /// G, heads of keys.
    pub key_value: i64,
    /// D.
    pub dim: i64,
    /// Norms of queries and keys, `[D]`, of one ε.
    pub gains: Option<[Gain<'a>; 2]>,
    /// Cosines and sines of what each row is turned by, D/2 of each.
    pub angles: [&'a Tensor; 2],
}

/// Whether there are kernels for layers of rows of `width` values, `inner` in the MLP, and heads of `dim` values, `repeats` of queries to one of keys, on
/// the device of `like`.
pub fn has_few_rows(like: &Tensor, width: i64, inner: i64, dim: i64, repeats: i64) -> bool {
    // SAFETY: the shim reads the tensor's device, and catches every C++ exception.
    unsafe { ds_has_few_rows(like.as_ptr().cast(), width, inner, dim, repeats) }
}

/// `norm(x) [W₁; W₂; W₃]ᵀ + residual` of up to [`FEW_ROWS`] rows `x [N, I]`: up to three weights `[Oᵢ, I]`, of which the outputs lie one behind the other.
/// Sums are float32, rounded once. Without a graph.
///
/// # Panics
/// If shapes, kinds or devices do not fit, or with the driver's words.
pub fn few_rows_product(
    x: &Tensor,
    gain: Option<Gain<'_>>,
    weights: &[&Tensor],
    residual: Option<&Tensor>,
) -> Tensor {
    let weights: Vec<*const c_void> = weights.iter().map(|weight| weight.as_ptr().cast()).collect();
    let (norm, eps) = pointers(gain);
    let residual = residual.map_or(ptr::null(), |residual| residual.as_ptr().cast());
    let mut out = ptr::null_mut();
    // SAFETY: the tensors are alive for the call, and libtorch gives their memory to nobody else before the stream is done with them. The shim looks at all
    // shapes, reads as many weights as there are, catches every C++ exception, and sets `out` where it returns null.
    let problem = unsafe {
        ds_few_rows_product(x.as_ptr().cast(), norm, eps, weights.as_ptr(), weights.len(), residual, &mut out)
    };
    made("a product of a few rows", problem, out)
}

/// `silu(norm(x) Wᵍᵀ) ⊙ (norm(x) Wᵘᵀ)` of up to [`FEW_ROWS`] rows `x [N, I]`, with weights `[O, I]`.
///
/// # Panics
/// As [`few_rows_product`].
pub fn few_rows_gated_product(x: &Tensor, gain: Gain<'_>, gate: &Tensor, up: &Tensor) -> Tensor {
    let (norm, eps) = pointers(Some(gain));
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
    made("a gated product of a few rows", problem, out)
}

/// [`super::history_attention`] of up to [`FEW_ROWS`] rows, all of them of some chunk, `qkv [N, (H + 2G)·D]`: queries, keys and values that are neither normed
/// nor turned yet. Gives `[N, H·D]`.
///
/// # Panics
/// As [`few_rows_product`], and if two chunks share a row of a pool.
pub fn few_rows_attention(
    qkv: &Tensor,
    heads: &FewRowsHeads<'_>,
    chunks: &[HistoryChunk<'_>],
    HistoryView { scale, window, sees_chunk }: HistoryView,
) -> Tensor {
    for (at, one) in chunks.iter().enumerate() {
        let is_shared = |other: &HistoryChunk<'_>| {
            other.row == one.row && other.pool[0].data_ptr() == one.pool[0].data_ptr()
        };
        assert!(!chunks[..at].iter().any(is_shared), "two chunks share a row of a pool");
    }
    let raw: Vec<RawChunk> = chunks
        .iter()
        .map(|chunk| RawChunk {
            keys: chunk.pool[0].as_ptr().cast(),
            values: chunk.pool[1].as_ptr().cast(),
            row: chunk.row as i64,
            past: chunk.past_len as i64,
            len: chunk.len as i64,
            first: chunk.first as i64,
        })
        .collect();
    let FewRowsHeads { query, key_value, dim, gains, angles } = *heads;
    let [(query_gain, eps), (key_gain, _)] = [0, 1].map(|of| pointers(gains.map(|gains| gains[of])));
    let [cosines, sines] = angles.map(|angles| angles.as_ptr().cast());
    // A window that no history is as long as is none.
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
    // SAFETY: as above; pools are written in rows and places that the shim looks at, which are the caller's.
    let problem =
        unsafe { ds_few_rows_attention(qkv.as_ptr().cast(), &heads, raw.as_ptr(), raw.len(), &mut out) };
    made("attention of a few rows", problem, out)
}

fn pointers(gain: Option<Gain<'_>>) -> (*const c_void, f64) {
    gain.map_or((ptr::null(), 0.0), |gain| (gain.weights.as_ptr().cast(), gain.eps))
}

#[track_caller]
fn made(what: &str, problem: *mut c_char, out: *mut c_void) -> Tensor {
    if let Err(problem) = check(problem) {
        panic!("{what}: {problem}");
    }
    // SAFETY: without an error it is a tensor from `new` that belongs to nobody else; tch frees it by `delete`.
    unsafe { Tensor::from_ptr(out.cast()) }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn values(shape: &[i64], step: f64) -> Tensor {
        let count = shape.iter().product::<i64>();
        let angles = Tensor::arange(count, (Kind::Double, Device::Cpu)) * step;
        ((angles.sin() * 37.0).sin() * 0.7).view(shape).to_kind(Kind::BFloat16)
    }

    fn assert_near(found: &Tensor, exact: &Tensor, what: &str) {
        let found = found.to_device(Device::Cpu).to_kind(Kind::Double);
        let off = (found - exact).abs().max().double_value(&[]);
        assert!(off <= 0.012 * exact.abs().max().double_value(&[]), "{what}: off by {off}");
    }

    /// On a GPU, where there is one to test on, a layer of a few rows is that of the formulas in float64; elsewhere there are no kernels.
    #[test]
    fn a_layer_of_a_few_rows_is_that_of_the_formulas() {
        let (width, inner, [query, group, dim], eps) = (256, 320, [6, 2, 64], 1e-6);
        if std::env::var("DEEPSPEC_TEST_DEVICE").as_deref() != Ok("cuda") {
            assert!(!has_few_rows(&values(&[1], 1.0), width, inner, dim, query / group));
            return;
        }
        crate::ffi::load_cuda().unwrap();
        let device = Device::Cuda(0);
        let there = |of: &Tensor| of.to_device(device);
        assert!(has_few_rows(&there(&values(&[1], 1.0)), width, inner, dim, query / group));
        let exact = |of: &Tensor| of.to_kind(Kind::Double);
        let rounded = |of: &Tensor| of.to_kind(Kind::BFloat16).to_kind(Kind::Double);
        let norm = |x: &Tensor, gain: &Tensor| {
            let mean = x.square().mean_dim([-1].as_slice(), true, Kind::Double);
            rounded(&(x * (mean + eps).rsqrt() * exact(gain)))
        };
        let (gain, head_gain) = (values(&[width], 0.3) + 1.0, values(&[dim], 0.9) + 1.0);
        let [w1, w2, w3] = [(query * dim, 0.11), (group * dim, 0.17), (group * dim, 0.19)]
            .map(|(outputs, step)| values(&[outputs, width], step));
        let [gate, up] = [0.23, 0.29].map(|step| values(&[inner, width], step));
        let (past, capacity) = ([5_usize, 200, 0], 256_i64);
        let rows: i64 = 8;
        let lens = [3_usize, 4, 1];
        let x = values(&[rows, width], 0.41);
        let [cosines, sines] = [0.7, 1.1].map(|step| values(&[rows, 1, dim / 2], step));
        let pool = [0.37, 0.53].map(|step| values(&[3, capacity, group, dim], step));
        let pools = [there(&pool[0]).copy(), there(&pool[1]).copy()];
        let device_x = there(&x);
        let qkv = few_rows_product(
            &device_x,
            Some(Gain { weights: &there(&gain), eps }),
            &[&there(&w1), &there(&w2), &there(&w3)],
            None,
        );
        let normed = norm(&exact(&x), &gain);
        let products = [&w1, &w2, &w3].map(|w| normed.matmul(&exact(w).tr()));
        assert_near(&qkv, &Tensor::cat(&products, 1), "queries, keys and values");
        let alone = few_rows_product(
            &device_x.narrow(0, 0, 1),
            Some(Gain { weights: &there(&gain), eps }),
            &[&there(&w1), &there(&w2), &there(&w3)],
            None,
        );
        assert!(alone.equal(&qkv.narrow(0, 0, 1)), "a lone row has other bits");

        let mut first = 0;
        let chunks: Vec<HistoryChunk> = (0..3)
            .map(|i| {
                first += lens[i];
                let (row, past_len, len) = (2 - i, past[i], lens[i]);
                HistoryChunk { pool: [&pools[0], &pools[1]], row, past_len, len, first: first - len }
            })
            .collect();
        let device_gain = there(&head_gain);
        let head_norm = Gain { weights: &device_gain, eps };
        let angles = [&there(&cosines), &there(&sines)];
        let heads = FewRowsHeads { query, key_value: group, dim, gains: Some([head_norm; 2]), angles };
        let view = HistoryView { scale: 0.3, window: Some(150), sees_chunk: false };
        let found = few_rows_attention(&qkv, &heads, &chunks, view);
        let products = exact(&qkv.to_device(Device::Cpu));
        let turned = |of: &Tensor, heads: i64| {
            let x = norm(&of.view([rows, heads, dim]), &head_gain);
            let (a, b) = (x.narrow(2, 0, dim / 2), x.narrow(2, dim / 2, dim / 2));
            let (c, s) = (exact(&cosines), exact(&sines));
            rounded(&Tensor::cat(&[&a * &c - &b * &s, &b * &c + &a * &s], 2))
        };
        let q = turned(&products.narrow(1, 0, query * dim), query);
        let k = turned(&products.narrow(1, query * dim, group * dim), group);
        let v = products.narrow(1, (query + group) * dim, group * dim).view([rows, group, dim]);
        let mut outputs = vec![];
        for chunk in &chunks {
            let all = |pool: &Tensor, new: &Tensor| {
                let before = exact(&pool.get(chunk.row as i64)).narrow(0, 0, chunk.past_len as i64);
                Tensor::cat(&[before, new.narrow(0, chunk.first as i64, chunk.len as i64)], 0)
            };
            let (keys, values) = (all(&pool[0], &k), all(&pool[1], &v));
            for (pool, expected) in pools.iter().zip([&keys, &values]) {
                let stored = pool.get(chunk.row as i64).narrow(0, 0, expected.size()[0]);
                assert_near(&stored, expected, "a history");
            }
            for i in 0..chunk.len {
                let position = chunk.past_len + i;
                let from = (position + 1).saturating_sub(150) as i64;
                let seen = |of: &Tensor| {
                    of.narrow(0, from, position as i64 + 1 - from)
                        .repeat_interleave_self_int(query / group, 1, None)
                        .transpose(0, 1)
                };
                let mine = q.get((chunk.first + i) as i64).unsqueeze(1); // [H, 1, D]
                let scores = mine.matmul(&seen(&keys).transpose(1, 2)) * 0.3;
                outputs.push(scores.softmax(-1, Kind::Double).matmul(&seen(&values)).flatten(0, 2));
            }
        }
        assert_near(&found, &Tensor::stack(&outputs, 0), "attention");

        let opened = few_rows_gated_product(
            &device_x,
            Gain { weights: &there(&gain), eps },
            &there(&gate),
            &there(&up),
        );
        let [left, right] = [&gate, &up].map(|w| normed.matmul(&exact(w).tr()));
        assert_near(&opened, &(left.silu() * right), "a gated product");
        let down = values(&[width, inner], 0.31);
        let closed = few_rows_product(&opened, None, &[&there(&down)], Some(&device_x));
        let opened = exact(&opened.to_device(Device::Cpu));
        assert_near(&closed, &(opened.matmul(&exact(&down).tr()) + exact(&x)), "what closes a layer");
    }
}
