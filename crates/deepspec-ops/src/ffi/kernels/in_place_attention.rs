//! Attention of a few queries per sequence over KV caches in pools.

use std::ffi::{c_char, c_void};
use std::ptr;

use tch::{Device, Kind, Tensor};

use super::super::args::{KvChunk, KvWindow, ProjectedHeads, QkvInput, RmsNormParams};
use super::super::c10d::check;

#[repr(C)]
pub(super) struct RawChunk {
    keys: *const c_void,
    values: *const c_void,
    row: i64,
    past: i64,
    len: i64,
    first: i64,
}

impl RawChunk {
    pub(super) fn of(chunk: &KvChunk<'_>) -> Self {
        Self {
            keys: chunk.pool[0].as_ptr().cast(),
            values: chunk.pool[1].as_ptr().cast(),
            row: chunk.row as i64,
            past: chunk.past_len as i64,
            len: chunk.len as i64,
            first: chunk.first as i64,
        }
    }
}

/// The C++ struct `QkvInput`.
#[repr(C)]
struct RawQkvInput {
    q: *const f32,
    k: *const f32,
    v: *const f32,
    rows: i64,
    heads: i64,
    groups: i64,
    dim: i64,
    query_line: i64,
    key_line: i64,
    query_gain: *const f32,
    key_gain: *const f32,
    cosines: *const f32,
    sines: *const f32,
    eps: f32,
}

impl RawQkvInput {
    /// Checks everything except whether kernels exist for the heads.
    ///
    /// # Panics
    /// If shapes or dtypes do not match.
    fn of(rows: QkvInput<'_>) -> Self {
        let values = |of: &Tensor| {
            assert!(is_contiguous_cpu_float(of), "float32 of the CPU, row by row");
            of.data_ptr().cast::<f32>().cast_const()
        };
        match rows {
            QkvInput::Separate([q, k, v]) => {
                let (size, [n, groups, dim]) = (q.size(), [0, 1, 2].map(|dim| k.size()[dim]));
                let fits = size.len() == 3 && size[0] == n && size[2] == dim && size[1] % groups.max(1) == 0;
                assert!(
                    fits && k.size() == v.size(),
                    "queries {size:?} over {:?} and {:?}",
                    k.size(),
                    v.size()
                );
                let [q, k, v] = [q, k, v].map(values);
                let ([query_gain, key_gain, cosines, sines], heads) = ([ptr::null(); 4], size[1]);
                let (query_line, key_line) = (heads * dim, groups * dim);
                let (rows, eps) = (n, 0.0);
                Self {
                    q,
                    k,
                    v,
                    rows,
                    heads,
                    groups,
                    dim,
                    query_line,
                    key_line,
                    query_gain,
                    key_gain,
                    cosines,
                    sines,
                    eps,
                }
            }
            QkvInput::Fused(qkv, ProjectedHeads { query: heads, key_value: groups, dim, gains, angles }) => {
                let size = qkv.size();
                let line = groups.checked_mul(2).and_then(|both| both.checked_add(heads)?.checked_mul(dim));
                let are_some = heads > 0 && groups > 0 && dim > 0;
                let fits =
                    size.len() == 2 && line == Some(size[1]) && heads % groups.max(1) == 0 && dim % 2 == 0;
                assert!(are_some && fits, "{heads}, {groups} and {groups} heads of {dim} in {size:?}");
                let (line, [of_queries, of_keys]) =
                    (size[1], gains.map_or([0.0; 2], |gains| gains.map(|gain| gain.eps)));
                assert!(of_queries == of_keys, "norms of one ε: {of_queries} and {of_keys}");
                let turns = |of: &&Tensor| of.numel() as i64 == size[0] * dim / 2;
                assert!(angles.iter().all(turns), "angles of {} rows, half of {dim} each", size[0]);
                let norms = |of: &RmsNormParams<'_>| of.weights.numel() as i64 == dim;
                assert!(gains.iter().flatten().all(norms), "norms of {dim} values");
                let [cosines, sines] = angles.map(values);
                let [query_gain, key_gain] =
                    [0, 1].map(|of| gains.map_or(ptr::null(), |gains| values(gains[of].weights)));
                let q = values(qkv);
                let k = q.wrapping_add((heads * dim) as usize);
                Self {
                    q,
                    k,
                    v: k.wrapping_add((groups * dim) as usize),
                    rows: size[0],
                    heads,
                    groups,
                    dim,
                    query_line: line,
                    key_line: line,
                    query_gain,
                    key_gain,
                    cosines,
                    sines,
                    eps: of_queries as f32,
                }
            }
        }
    }
}

unsafe extern "C" {
    fn ds_has_in_place_attention(dim: i64) -> bool;
    fn ds_in_place_attention(
        rows: *const RawQkvInput,
        chunks: *const RawChunk,
        count: usize,
        scale: f64,
        window: i64,
        causal: bool,
        out: *mut *mut c_void,
    ) -> *mut c_char;
}

/// Whether [`in_place_attention`] supports heads of `dim` values: multiples of 8, on x86 with AVX2.
pub fn has_in_place_attention(dim: i64) -> bool {
    // SAFETY: the shim only queries the processor.
    unsafe { ds_has_in_place_attention(dim) }
}

/// Appends the chunks' keys and values to their KV caches, and attends to both. Returns `[N, H·D]`, with zeros in
/// rows of no chunk. All tensors are float32 on the CPU, and autograd records nothing. Chunks share neither pool rows
/// nor queries.
///
/// A query's result depends only on its own sequence, and its bits do not depend on other queries. The kernel does
/// not copy KV caches, and reads nothing after their end.
///
/// # Panics
/// If shapes, dtypes or positions do not match, if [`has_in_place_attention`] is false, or if a tensor requires a
/// gradient.
pub fn in_place_attention(
    rows: QkvInput<'_>,
    chunks: &[KvChunk<'_>],
    KvWindow { scale, window, sees_chunk }: KvWindow,
) -> Tensor {
    let learns = match rows {
        QkvInput::Separate(parts) => parts.into_iter().any(Tensor::requires_grad),
        QkvInput::Fused(qkv, _) => qkv.requires_grad(),
    };
    assert!(!learns, "in-place attention has no gradient");
    let rows = RawQkvInput::of(rows);
    let RawQkvInput { rows: n, groups, dim, .. } = rows;
    assert!(has_in_place_attention(dim), "heads of {dim} on this processor");
    // Consecutive chunks mostly share a pool, and checking a pool takes longer than attending.
    let mut known: Option<([&Tensor; 2], [usize; 2])> = None;
    let mut places = vec![]; // start and end addresses
    for chunk in chunks {
        let same = |&(pool, _): &([&Tensor; 2], _)| (0..2).all(|i| ptr::eq(pool[i], chunk.pool[i]));
        let (_, [rows, capacity]) = known.filter(same).unwrap_or_else(|| {
            let [rows, capacity] = [0, 1].map(|dim| chunk.pool[0].size()[dim]);
            let size = [rows, capacity, groups, dim];
            assert!(
                chunk.pool.iter().all(|pool| pool.size() == size && is_contiguous_cpu_float(pool)),
                "pools of {size:?}"
            );
            (chunk.pool, [rows as usize, capacity as usize])
        });
        known = Some((chunk.pool, [rows, capacity]));
        let bytes = capacity * (groups * dim) as usize * size_of::<f32>();
        places.extend(chunk.pool.map(|pool| {
            let from = (pool.data_ptr() as usize).saturating_add(chunk.row.saturating_mul(bytes));
            (from, from.saturating_add(bytes))
        }));
        assert!(
            chunk.row < rows && ends_within(chunk.past_len, chunk.len, capacity),
            "places {}..{} in row {} of a pool of {rows} rows of {capacity}",
            chunk.past_len,
            chunk.past_len.saturating_add(chunk.len),
            chunk.row
        );
        assert!(chunk.len > 0 && ends_within(chunk.first, chunk.len, n as usize), "rows of {n}");
    }
    // Chunks run in parallel, so each needs its own pool row and its own rows of the result.
    places.sort_unstable();
    assert!(places.windows(2).all(|pair| pair[0].1 <= pair[1].0), "two chunks share a row of a pool");
    let mut queries: Vec<_> = chunks.iter().map(|chunk| (chunk.first, chunk.len)).collect();
    queries.sort_unstable();
    assert!(queries.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "two chunks share a query");
    let raw: Vec<RawChunk> = chunks.iter().map(RawChunk::of).collect();
    let window = window.map_or(0, |window| i64::try_from(window.max(1)).unwrap_or(i64::MAX));
    let ((chunks, count), mut out) = ((raw.as_ptr(), raw.len()), ptr::null_mut());
    // SAFETY: all tensors outlive the call, and the checks above keep every access inside them. The shim catches
    // every C++ exception, and sets `out` if it returns null.
    let problem =
        unsafe { ds_in_place_attention(&rows, chunks, count, scale, window, !sees_chunk, &mut out) };
    if let Err(problem) = check(problem) {
        panic!("in-place attention: {problem}");
    }
    // SAFETY: without an error, `out` is a tensor from `new` that nobody else owns; tch frees it by `delete`.
    unsafe { Tensor::from_ptr(out.cast()) }
}

/// Whether a tensor is contiguous float32 on the CPU.
fn is_contiguous_cpu_float(of: &Tensor) -> bool {
    of.device() == Device::Cpu && of.kind() == Kind::Float && of.is_contiguous()
}

/// Whether the range of `len` from `first` ends within `all`.
fn ends_within(first: usize, len: usize, all: usize) -> bool {
    first.checked_add(len).is_some_and(|end| end <= all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

    fn values(shape: &[i64], seed: f64) -> Tensor {
        let count = shape.iter().product::<i64>();
        (Tensor::arange(count, CPU) * (0.7 + seed)).sin().view(shape) * 2.0
    }

    #[test]
    fn it_is_attention_of_what_is_seen() {
        let (heads, groups, capacity) = (6, 2, 300);
        let windows = [(None, false), (None, true), (Some(40), false), (Some(3), true)];
        for (dim, (window, sees_chunk)) in
            [8, 16, 48].into_iter().flat_map(|dim| windows.map(|view| (dim, view)))
        {
            let pool = [0.1, 0.2].map(|seed| values(&[3, capacity, groups, dim], seed));
            // Memory after the end of a KV cache holds NaN.
            for tensor in &pool {
                let _ = tensor.narrow(1, 258, capacity - 258).fill_(f64::NAN);
            }
            let places = [(2, 250, 8, 0), (0, 0, 1, 8), (1, 33, 5, 9)]; // row, past, len, first
            let [q, k, v] =
                [(heads, 0.3), (groups, 0.4), (groups, 0.5)].map(|(h, s)| values(&[14, h, dim], s));
            let chunks = places.map(|(row, past_len, len, first)| KvChunk {
                pool: [&pool[0], &pool[1]],
                row,
                past_len,
                len,
                first,
            });
            let view = KvWindow { scale: 0.2, window, sees_chunk };
            let attend = |chunks: &[KvChunk<'_>]| {
                in_place_attention(QkvInput::Separate([&q, &k, &v]), chunks, view).view([14, heads, dim])
            };
            let all = attend(&chunks);
            for chunk in &chunks {
                let [row, past, len, first] =
                    [chunk.row, chunk.past_len, chunk.len, chunk.first].map(|number| number as i64);
                let history = |of: &Tensor| of.get(row).narrow(0, 0, past + len).transpose(0, 1);
                let expand = |of: Tensor| of.repeat_interleave_self_int(heads / groups, 0, None::<i64>);
                let (keys, values) = (expand(history(&pool[0])), expand(history(&pool[1])));
                assert!(pool[0].get(row).narrow(0, past, len).equal(&k.narrow(0, first, len)), "stored");
                let own = Tensor::arange(len, (Kind::Int64, Device::Cpu)).unsqueeze(1) + past;
                let key = Tensor::arange(past + len, (Kind::Int64, Device::Cpu)).unsqueeze(0);
                let mut seen =
                    if sees_chunk { key.ge(0).expand([len, -1], false) } else { key.le_tensor(&own) };
                if let Some(window) = window {
                    seen = seen.logical_and(&key.gt_tensor(&(&own - window as i64)));
                }
                let queries = q.narrow(0, first, len).transpose(0, 1);
                let expected = Tensor::scaled_dot_product_attention(
                    &queries,
                    &keys,
                    &values,
                    Some(&seen),
                    0.0,
                    false,
                    0.2,
                    false,
                );
                let found = all.narrow(0, first, len).transpose(0, 1);
                assert!(found.allclose(&expected, 1e-5, 1e-5, false), "window {window:?}, {sees_chunk}");
                // A chunk alone gives the same bits.
                let alone = attend(std::slice::from_ref(chunk));
                assert!(alone.narrow(0, first, len).equal(&all.narrow(0, first, len)));
                // A query without later tokens in its chunk gives the same bits.
                if !sees_chunk {
                    let brief = KvChunk { len: 1, ..*chunk };
                    let brief = attend(&[brief]);
                    assert!(brief.narrow(0, first, 1).equal(&all.narrow(0, first, 1)));
                }
            }
        }
    }

    #[test]
    fn what_is_normed_and_turned_on_the_way_has_the_same_bits() {
        let (heads, groups, dim, n) = (6, 2, 24, 9);
        let qkv = values(&[n, (heads + 2 * groups) * dim], 0.1);
        let part = |first: i64, count: i64| {
            qkv.narrow(1, first * dim, count * dim).contiguous().view([n, count, dim])
        };
        let [q, k, v] = [(0, heads), (heads, groups), (heads + groups, groups)].map(|(at, of)| part(at, of));
        let gains = [0.3, 0.6].map(|seed| values(&[dim], seed) + 1.5);
        let angles = Tensor::arange(n * dim / 2, CPU).view([n, 1, dim / 2]);
        let (cosines, sines) = (angles.cos(), angles.sin());
        for is_normed in [true, false] {
            let gains =
                is_normed.then(|| gains.each_ref().map(|weights| RmsNormParams { weights, eps: 1e-6 }));
            let ready = |x: &Tensor, of: usize| {
                let normed = match gains {
                    Some(gains) => super::super::rms_norm(x, gains[of].weights, gains[of].eps).unwrap(),
                    None => x.shallow_clone(),
                };
                super::super::rotate(&normed, &cosines, &sines).unwrap()
            };
            let (q, k) = (ready(&q, 0), ready(&k, 1));
            let angles = [&cosines, &sines];
            let raw = ProjectedHeads { query: heads, key_value: groups, dim, gains, angles };
            let view = KvWindow { scale: 0.2, window: Some(11), sees_chunk: !is_normed };
            let attended = [QkvInput::Separate([&q, &k, &v]), QkvInput::Fused(&qkv, raw)].map(|rows| {
                let pool = [0.2, 0.4].map(|seed| values(&[2, 40, groups, dim], seed));
                let chunk = |row, past_len, len, first| KvChunk {
                    pool: [&pool[0], &pool[1]],
                    row,
                    past_len,
                    len,
                    first,
                };
                // Row 7 belongs to no chunk.
                let seen = in_place_attention(rows, &[chunk(1, 30, 7, 0), chunk(0, 3, 1, 8)], view);
                let [keys, values] = pool;
                [seen, keys, values]
            });
            let [split_rows, together] = attended;
            assert!(
                split_rows.iter().zip(&together).all(|(split_rows, together)| split_rows.equal(together)),
                "{is_normed}"
            );
            assert_eq!(together[0].get(7).abs().max().double_value(&[]), 0.0);
        }
    }

    /// The panic message for `query` and `key_value` heads of `dim` values in rows of 72.
    fn refusal(query: i64, key_value: i64, dim: i64) -> String {
        let (qkv, angles) = (values(&[3, 72], 0.0), values(&[3, 1, 4], 0.0));
        let angles = [&angles; 2];
        let heads = ProjectedHeads { query, key_value, dim, gains: None, angles };
        let view = KvWindow { scale: 1.0, window: None, sees_chunk: false };
        let attend = || in_place_attention(QkvInput::Fused(&qkv, heads), &[], view);
        let words = std::panic::catch_unwind(std::panic::AssertUnwindSafe(attend)).expect_err("refused");
        words.downcast_ref::<String>().cloned().unwrap_or_default()
    }

    #[test]
    fn heads_that_do_not_fit_their_rows_are_refused() {
        // The last case gives 72 values only if the product overflows.
        for (query, key_value, dim) in [(6, 2, 8), (0, 1, 36), (-9, 9, 8), (5, 2, 8), ((1 << 61) + 5, 2, 8)] {
            let said = refusal(query, key_value, dim);
            let expected = format!("{query}, {key_value} and {key_value} heads of {dim} in [3, 72]");
            assert!(said.contains(&expected), "{said:?}");
        }
    }

    #[test]
    #[should_panic(expected = "two chunks share a row")]
    fn pools_that_lie_in_each_other_are_refused() {
        let pool = values(&[3, 4, 1, 8], 0.0);
        let [first, last] = [0, 1].map(|row| pool.narrow(0, row, 2));
        let new = values(&[2, 1, 8], 0.0);
        let chunks =
            [0, 1].map(|row| KvChunk { pool: [&first, &last], row, past_len: 0, len: 1, first: row });
        let view = KvWindow { scale: 1.0, window: None, sees_chunk: false };
        let _ = in_place_attention(QkvInput::Separate([&new, &new, &new]), &chunks, view);
    }

    #[test]
    #[should_panic(expected = "two chunks share a query")]
    fn chunks_of_the_same_queries_are_refused() {
        let pools = [0.0, 1.0].map(|seed| values(&[2, 4, 1, 8], seed));
        let new = values(&[2, 1, 8], 0.0);
        let chunk = |row| KvChunk { pool: [&pools[0], &pools[1]], row, past_len: 0, len: 1, first: 0 };
        let view = KvWindow { scale: 1.0, window: None, sees_chunk: false };
        let _ = in_place_attention(QkvInput::Separate([&new, &new, &new]), &[chunk(0), chunk(1)], view);
    }

    #[test]
    #[should_panic(expected = "places 2..5 in row 0 of a pool of 1 rows of 4")]
    fn places_outside_a_pool_are_refused() {
        let pool = values(&[1, 4, 1, 8], 0.0);
        let new = values(&[3, 1, 8], 0.0);
        let chunk = KvChunk { pool: [&pool, &pool], row: 0, past_len: 2, len: 3, first: 0 };
        let view = KvWindow { scale: 1.0, window: None, sees_chunk: false };
        let _ = in_place_attention(QkvInput::Separate([&new, &new, &new]), &[chunk], view);
    }
}
