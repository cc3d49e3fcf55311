// Attention of a few queries of each sequence over its own history, where that lies: histories are not copied, and nothing behind them is read. What
// becomes of a query follows from its own sequence alone, and its bits do not depend on the queries beside it.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>

#include "group.h"
#include "operators.h"
#include "tiles.h"

namespace {

// One sequence's queries, and the row of the pool that holds its history.
struct HistoryChunk {
  const at::Tensor *keys, *values;  // [rows, capacity, G, D]
  int64_t row, past, len;
  int64_t first;  // of its rows in q
};

#if DEEPSPEC_TILES

// All chunks of a call, and how they are read.
struct Reading {
  const float *q, *k, *v;  // [N, H, D], [N, G, D] twice
  float* out;              // [N, H, D]
  int64_t heads, groups, dim;
  float scale;
  int64_t window;  // keys that a query sees; 0 for all before it
  bool causal;     // else a query sees all of its chunk
  const HistoryChunk* chunks;

  // Keys whose values a tile sums before the next ones: the first cache holds a vector pair of each.
  static constexpr int64_t kKeys = 256;

  // The queries of chunk `task / groups` that share a head of keys. Scores are [keys, line]: a query's lie one above the other, so that queries are
  // weighed side by side, and keys and values are read as they lie.
  template <typename Vector>
  DEEPSPEC_TILE_INLINE void attend(int64_t task) const {
    const HistoryChunk& chunk = chunks[task / groups];
    const int64_t group = task % groups, repeats = heads / groups, step = groups * dim;
    const int64_t start = chunk.row * chunk.keys->size(1) * step + group * dim;
    float* keys = chunk.keys->mutable_data_ptr<float>() + start;
    float* values = chunk.values->mutable_data_ptr<float>() + start;
    for (int64_t i = 0; i < chunk.len; ++i) {
      const int64_t from = (chunk.first + i) * step + group * dim, to = (chunk.past + i) * step;
      std::memcpy(keys + to, k + from, dim * sizeof(float));
      std::memcpy(values + to, v + from, dim * sizeof(float));
    }
    const int64_t before = window == 0 ? 0 : std::max<int64_t>(0, chunk.past + 1 - window);
    const int64_t seen = chunk.past + chunk.len - before, rows = repeats * chunk.len;
    const int64_t line = (rows + kLength<Vector> - 1) / kLength<Vector> * kLength<Vector>;
    // Kept from call to call.
    static thread_local std::vector<float> memory;
    const size_t needed = (dim + seen + 1) * line + rows * dim + kKeys * 2 * kLength<Vector>;
    if (memory.size() < needed) {
      memory.clear();
      memory.resize(needed);
    }
    float *queries = memory.data(), *scores = queries + dim * line, *totals = scores + seen * line, *sums = totals + line;
    const auto head_of = [&](int64_t row) {
      return ((chunk.first + row / repeats) * heads + group * repeats + row % repeats) * dim;
    };
    std::fill(queries, scores, 0.0f);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < dim; ++i) queries[i * line + row] = q[head_of(row) + i] * scale;
    score<Vector>(keys + before * step, step, seen, queries, line, scores);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = chunk.past + row / repeats;
      const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, position + 1 - window - before);
      const int64_t end = causal ? position + 1 - before : seen;
      for (int64_t key = 0; key < first; ++key) scores[key * line + row] = kLowest;
      for (int64_t key = end; key < seen; ++key) scores[key * line + row] = kLowest;
    }
    for (int64_t lane = 0; lane < line; lane += kLength<Vector>) weigh<kLength<Vector>>(scores + lane, line, seen, totals + lane);
    for (int64_t key = 0; key < seen; key += kKeys)
      add<Vector>(
          scores + key * line, line, rows, values + (before + key) * step, step, std::min(kKeys, seen - key), sums + rows * dim, sums,
          key > 0);
    for (int64_t row = 0; row < rows; ++row) {
      float* to = out + head_of(row);
      const float factor = 1.0f / totals[row];
      for (int64_t i = 0; i < dim; ++i) to[i] = sums[row * dim + i] * factor;
    }
  }

  // Products of keys, `step` apart, and queries [dim, line]: [seen, line].
  template <typename Vector>
  DEEPSPEC_TILE_INLINE void score(
      const float* keys, int64_t step, int64_t seen, const float* queries, int64_t line, float* scores) const {
    for (int64_t key = 0, count; key < seen; key += count) {
      count = rows_of_tile<Vector>(seen - key);
      int64_t column = 0;
      const auto of = [&] { return TileOf{keys + key * step, step, 1, queries + column, line, dim}; };
      for (; column + 2 * kLength<Vector> <= line; column += 2 * kLength<Vector>)
        tile_of<Vector, 2, false>(count, of(), scores + key * line + column, line, false);
      if (column < line) tile_of<Vector, 1, false>(count, of(), scores + key * line + column, line, false);
    }
  }

  // Turns as many columns of scores [seen, line] as there are lanes into weights, without dividing them by their sums, which it gives.
  template <int64_t kWidth>
  DEEPSPEC_TILE_INLINE static void weigh(float* scores, int64_t line, int64_t seen, float* totals) {
    float most[kWidth], sums[kWidth] = {};
    for (float& lane : most) lane = kLowest;
    for (int64_t key = 0; key < seen; ++key)
      for (int64_t lane = 0; lane < kWidth; ++lane) most[lane] = std::max(most[lane], scores[key * line + lane]);
    for (int64_t key = 0; key < seen; ++key)
      for (int64_t lane = 0; lane < kWidth; ++lane) {
        const float weight = exponential(scores[key * line + lane] - most[lane]);
        scores[key * line + lane] = weight;
        sums[lane] += weight;
      }
    std::copy_n(sums, kWidth, totals);
  }

  // Sums of the values of some keys, `step` apart, by weights [keys, line]: [rows, dim], or added to what is there.
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
    // Values that are read more than once lie side by side then: many that are a power of two apart do not stay in a cache.
    if (rows > kTileRows<Vector>) {
      for (int64_t key = 0; key < keys; ++key) std::memcpy(panel + key * kWidth, values + key * step, kWidth * sizeof(float));
      values = panel, step = kWidth;
    }
    for (int64_t row = 0, count; row < rows; row += count) {
      count = rows_of_tile<Vector>(rows - row);
      tile_of<Vector, kVectors, false>(count, {weights + row, 1, line, values, step, keys}, sums + row * dim, dim, continues);
    }
  }
};

DEEPSPEC_AVX2 void attend_avx2(const Reading& reading, int64_t task) { reading.attend<Eight>(task); }
DEEPSPEC_AVX512 void attend_avx512(const Reading& reading, int64_t task) { reading.attend<Sixteen>(task); }

#endif

}  // namespace

extern "C" {

// Whether there is attention over histories for heads of `dim` values on this processor.
bool ds_has_history_attention([[maybe_unused]] int64_t dim) {
#if DEEPSPEC_TILES
  return tile_level() != kNone && dim > 0 && dim % kLength<Eight> == 0;
#else
  return false;
#endif
}

// Stores k and v [N, G, D] in the chunks' histories and gives what their queries q [N, H, D] see there, [N, H, D]; zeros in rows of no chunk.
// Everything was checked before.
char* ds_history_attention(
    [[maybe_unused]] const at::Tensor* q, [[maybe_unused]] const at::Tensor* k, [[maybe_unused]] const at::Tensor* v,
    [[maybe_unused]] const HistoryChunk* chunks, [[maybe_unused]] size_t count, [[maybe_unused]] double scale,
    [[maybe_unused]] int64_t window, [[maybe_unused]] bool causal, [[maybe_unused]] at::Tensor** result) {
  return caught([&] {
#if DEEPSPEC_TILES
    RECORD_USER_SCOPE("history_attention");
    int64_t rows = 0;
    for (size_t i = 0; i < count; ++i) rows += chunks[i].len;
    at::Tensor out = rows == q->size(0) ? at::empty_like(*q) : at::zeros_like(*q);
    const Reading reading{
        q->const_data_ptr<float>(),
        k->const_data_ptr<float>(),
        v->const_data_ptr<float>(),
        out.mutable_data_ptr<float>(),
        q->size(1),
        k->size(1),
        q->size(2),
        static_cast<float>(scale),
        window,
        causal,
        chunks};
    const auto attend = tile_level() == kAvx512 && reading.dim % kLength<Sixteen> == 0 ? attend_avx512 : attend_avx2;
    for_tasks(static_cast<int64_t>(count) * k->size(1), 1, [&](int64_t task) { attend(reading, task); });
    *result = new at::Tensor(std::move(out));
#else
    TORCH_CHECK(false, "built for another processor");
#endif
  });
}
}
