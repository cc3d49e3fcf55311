// Attention of a few queries per sequence over the KV cache of that sequence. The cache is read in place, without a
// copy, and nothing after its end is read. A query's result depends only on its own sequence, and its bits do not
// depend on the other queries.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include "group.h"
#include "operators.h"
#include "tiles.h"

namespace {

// The queries of one sequence and the pool row that holds its KV cache.
struct HistoryChunk {
  const at::Tensor *keys, *values;  // [rows, capacity, G, D]
  int64_t row, past, len;
  int64_t first;  // its first row in q
};

// The inputs: queries [N, H, D], keys and values [N, G, D] of all rows.
struct QkvInput {
  const float *q, *k, *v;
  int64_t rows, heads, groups, dim;
  int64_t query_line, key_line;  // floats from one row to the next of queries, and of keys and values
  // RMS norm gains [D] of queries and keys, and rotary cosines and sines [N, D/2]. Null if not wanted or already
  // applied.
  const float *query_gain, *key_gain, *cosines, *sines;
  float eps;
};

#if DEEPSPEC_TILES

// All chunks of a call and the settings of the attention.
struct Reading : QkvInput {
  float* out;  // [N, H, D]
  float scale;
  int64_t window;  // keys that a query sees; 0 for all keys before it
  bool causal;     // otherwise a query sees its whole chunk
  const HistoryChunk* chunks;
  int64_t count;

  // Keys of one pass over the values: the L1 cache holds a pair of vectors for each of them.
  static constexpr int64_t kKeys = 256;
  // Values whose stride is a multiple of this many floats collide in the L1 cache.
  static constexpr int64_t kColliding = 64;
  // Floats of keys, and of values, that are prefetched: a large part of the L2 cache. KV caches come from main memory,
  // and waiting for each cache line would take as long as the products.
  static constexpr int64_t kSoon = 64 << 10;

  // Attends for the queries of chunk `task / groups` that share one KV head. Scores are [keys, line], with one column
  // per query. The softmax then runs over several queries at once, and keys and values are read in memory order.
  template <typename Vector>
  DEEPSPEC_TILE_INLINE void attend(int64_t task) const {
    const HistoryChunk& chunk = chunks[task / groups];
    const int64_t group = task % groups, repeats = heads / groups, step = groups * dim;
    float *keys = history(*chunk.keys, task), *values = history(*chunk.values, task);
    const int64_t before = first_seen(chunk);
    const int64_t seen = chunk.past + chunk.len - before, rows = repeats * chunk.len;
    const int64_t line = (rows + kLength<Vector> - 1) / kLength<Vector> * kLength<Vector>;
    // Kept between calls.
    static thread_local std::vector<float> memory;
    const size_t needed = (dim + seen + 1) * line + (rows + 2) * dim + kKeys * 2 * kLength<Vector>;
    if (memory.size() < needed) {
      memory.clear();
      memory.resize(needed);
    }
    float *queries = memory.data(), *scores = queries + dim * line, *totals = scores + seen * line, *room = totals + line;
    float* sums = room + 2 * dim;
    for (int64_t i = 0; i < chunk.len; ++i) {
      const int64_t row = chunk.first + i, from = row * key_line + group * dim, to = (chunk.past + i) * step;
      std::memcpy(keys + to, attending(k + from, key_gain, row, room), dim * sizeof(float));
      std::memcpy(values + to, v + from, dim * sizeof(float));
    }
    // Score columns are the query heads of the group for the chunk's first row, then for the next one.
    const auto row_of = [&](int64_t row) { return chunk.first + row / repeats; };
    const auto head_of = [&](int64_t row) { return (group * repeats + row % repeats) * dim; };
    std::fill(queries, scores, 0.0f);
    for (int64_t row = 0; row < rows; ++row) {
      const float* query = attending(q + row_of(row) * query_line + head_of(row), query_gain, row_of(row), room);
      for (int64_t i = 0; i < dim; ++i) queries[i * line + row] = query[i] * scale;
    }
    score<Vector>(keys + before * step, values + before * step, step, seen, queries, line, scores);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = chunk.past + row / repeats;
      const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, position + 1 - window - before);
      const int64_t end = causal ? position + 1 - before : seen;
      for (int64_t key = 0; key < first; ++key) scores[key * line + row] = kLowest;
      for (int64_t key = end; key < seen; ++key) scores[key * line + row] = kLowest;
    }
    for (int64_t lane = 0; lane < line; lane += kLength<Vector>) weigh<kLength<Vector>>(scores + lane, line, seen, totals + lane);
    if (task + 1 < count * groups) ask_for(task + 1);
    for (int64_t key = 0; key < seen; key += kKeys)
      add<Vector>(
          scores + key * line, line, rows, values + (before + key) * step, step, std::min(kKeys, seen - key), sums + rows * dim, sums,
          key > 0);
    for (int64_t row = 0; row < rows; ++row) {
      float* to = out + row_of(row) * heads * dim + head_of(row);
      const float factor = 1.0f / totals[row];
      for (int64_t i = 0; i < dim; ++i) to[i] = sums[row * dim + i] * factor;
    }
  }

  // Returns a head ready for attention: normalised and rotated in `room` [2, D] if wanted.
  const float* attending(const float* head, const float* gain, int64_t row, float* room) const {
    if (gain) norm_row(head, gain, eps, dim, room), head = room;
    if (!cosines) return head;
    const int64_t half = dim / 2;
    rotate_row(head, cosines + row * half, sines + row * half, 1.0f, half, room + dim);
    return room + dim;
  }

  // Returns the first key or value of a task's chunk; the next ones follow at a distance of groups * dim.
  float* history(const at::Tensor& pool, int64_t task) const {
    return pool.mutable_data_ptr<float>() + (chunks[task / groups].row * pool.size(1) * groups + task % groups) * dim;
  }

  // The first key that any query of the chunk sees.
  int64_t first_seen(const HistoryChunk& chunk) const { return window == 0 ? 0 : std::max<int64_t>(0, chunk.past + 1 - window); }

  // Prefetches the cached keys of a task and the places of its new keys and values.
  DEEPSPEC_TILE_INLINE void ask_for(int64_t task) const {
    const HistoryChunk& chunk = chunks[task / groups];
    const int64_t step = groups * dim, before = first_seen(chunk), end = std::min(chunk.past, before + kSoon / dim);
    const float *keys = history(*chunk.keys, task), *values = history(*chunk.values, task);
    for (int64_t key = before; key < end; ++key) ask_for(keys + key * step);
    for (int64_t key = chunk.past; key < std::min(chunk.past + chunk.len, chunk.past + kSoon / dim); ++key)
      ask_for(keys + key * step), ask_for(values + key * step);
  }

  // Always inlined: the compiler would drop a call that only prefetches, as a call without effects.
  DEEPSPEC_TILE_INLINE void ask_for(const float* head) const {
    for (int64_t i = 0; i < dim; i += Ahead::kLine) __builtin_prefetch(head + i, 0, 2);
  }

  // Products of keys, `step` floats apart, with queries [dim, line]: [seen, line]. Also prefetches the values of the
  // keys.
  template <typename Vector>
  DEEPSPEC_TILE_INLINE void score(
      const float* keys, const float* values, int64_t step, int64_t seen, const float* queries, int64_t line, float* scores) const {
    const int64_t vectors = line / kLength<Vector>;
    int64_t column = 0;
    if (vectors == 1)
      column = score_columns<Vector, 1>(keys, values, step, seen, queries, line, scores);
    else if (vectors % 2 == 1)
      column = score_columns<Vector, 3>(keys, values, step, seen, queries, line, scores);
    while (column < line)
      column += score_columns<Vector, 2>(
          keys, column == 0 ? values : nullptr, step, seen, queries + column, line, scores + column);
  }

  // As `score`, for kVectors vectors of columns; returns the number of columns. `values` may be null.
  template <typename Vector, int kVectors>
  DEEPSPEC_TILE_INLINE int64_t score_columns(
      const float* keys, const float* values, int64_t step, int64_t seen, const float* queries, int64_t line, float* scores) const {
    const int64_t asked = values ? std::min(seen, kSoon / dim) : 0;
    for (int64_t key = 0, count; key < seen; key += count) {
      count = rows_of_tile<Vector, kVectors>(seen - key);
      for (int64_t i = key; i < std::min(asked, key + count); ++i) ask_for(values + i * step);
      tile_of<Vector, kVectors, false>(count, {keys + key * step, step, 1, queries, line, dim}, scores + key * line, line, false);
    }
    return kVectors * kLength<Vector>;
  }

  // Replaces kWidth columns of scores [seen, line] by softmax weights that are not yet divided by their sums. Writes
  // the sums to `totals`.
  template <int64_t kWidth>
  DEEPSPEC_TILE_INLINE static void weigh(float* scores, int64_t line, int64_t seen, float* totals) {
    float most[kWidth], sums[kWidth] = {};
    for (float& lane : most) lane = kLowest;
    // Each loop over lanes becomes vector instructions; the compiler would split it if it were unrolled first.
    for (int64_t key = 0; key < seen; ++key) {
      const float* here = scores + key * line;
#pragma GCC unroll 1
      for (int64_t lane = 0; lane < kWidth; ++lane) most[lane] = here[lane] > most[lane] ? here[lane] : most[lane];
    }
    for (int64_t key = 0; key < seen; ++key) {
      float* here = scores + key * line;
#pragma GCC unroll 1
      for (int64_t lane = 0; lane < kWidth; ++lane) {
        const float weight = exponential(here[lane] - most[lane]);
        here[lane] = weight;
        sums[lane] += weight;
      }
    }
    std::copy_n(sums, kWidth, totals);
  }

  // Sums the values of some keys, `step` floats apart, by weights [keys, line]. Writes [rows, dim], or adds to it if
  // `continues`.
  template <typename Vector>
  DEEPSPEC_TILE_INLINE void add(
      const float* weights, int64_t line, int64_t rows, const float* values, int64_t step, int64_t keys, float* panel, float* sums,
      bool continues) const {
    int64_t column = 0;
    for (; column + 2 * kLength<Vector> <= dim; column += 2 * kLength<Vector>)
      add_columns<Vector, 2>(weights, line, rows, values + column, step, keys, panel, sums + column, continues);
    if (column < dim) add_columns<Vector, 1>(weights, line, rows, values + column, step, keys, panel, sums + column, continues);
  }

  template <typename Vector, int kVectors>
  DEEPSPEC_TILE_INLINE void add_columns(
      const float* weights, int64_t line, int64_t rows, const float* values, int64_t step, int64_t keys, float* panel, float* sums,
      bool continues) const {
    constexpr int64_t kWidth = kVectors * kLength<Vector>;
    // Values that are read more than once and lie a large power of two apart would not stay in the L1 cache. They are
    // copied side by side first.
    if (rows > kTileRows<Vector, kVectors> && step % kColliding == 0) {
      for (int64_t key = 0; key < keys; ++key) std::memcpy(panel + key * kWidth, values + key * step, kWidth * sizeof(float));
      values = panel, step = kWidth;
    }
    for (int64_t row = 0, count; row < rows; row += count) {
      count = rows_of_tile<Vector, kVectors>(rows - row);
      tile_of<Vector, kVectors, false>(count, {weights + row, 1, line, values, step, keys}, sums + row * dim, dim, continues);
    }
  }
};

DEEPSPEC_AVX2 void attend_avx2(const Reading& reading, int64_t task) { reading.attend<Eight>(task); }
DEEPSPEC_AVX512 void attend_avx512(const Reading& reading, int64_t task) { reading.attend<Sixteen>(task); }

#endif

}  // namespace

extern "C" {

// Whether this processor has in-place attention for heads of `dim` values.
bool ds_has_in_place_attention([[maybe_unused]] int64_t dim) {
#if DEEPSPEC_TILES
  return tile_level() != kNone && dim > 0 && dim % kLength<Eight> == 0;
#else
  return false;
#endif
}

// Appends keys and values to the chunks' KV caches and returns the attention output [N, H * D]; rows of no chunk are
// zero. The caller has checked all arguments.
char* ds_in_place_attention(
    [[maybe_unused]] const QkvInput* rows, [[maybe_unused]] const HistoryChunk* chunks, [[maybe_unused]] size_t count,
    [[maybe_unused]] double scale, [[maybe_unused]] int64_t window, [[maybe_unused]] bool causal, [[maybe_unused]] at::Tensor** result) {
  return caught([&] {
#if DEEPSPEC_TILES
    RECORD_USER_SCOPE("in_place_attention");
    int64_t queries = 0;
    for (size_t i = 0; i < count; ++i) queries += chunks[i].len;
    const auto size = {rows->rows, rows->heads * rows->dim};
    at::Tensor out = queries == rows->rows ? at::empty(size, at::kFloat) : at::zeros(size, at::kFloat);
    const Reading reading{
        *rows, out.mutable_data_ptr<float>(), static_cast<float>(scale), window, causal, chunks, static_cast<int64_t>(count)};
    const auto attend = tile_level() == kAvx512 && rows->dim % kLength<Sixteen> == 0 ? attend_avx512 : attend_avx2;
    for_tasks(static_cast<int64_t>(count) * rows->groups, 1, [&](int64_t task) { attend(reading, task); });
    *result = new at::Tensor(std::move(out));
#else
    TORCH_CHECK(false, "built for another processor");
#endif
  });
}
}
