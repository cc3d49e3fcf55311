// Attention of a few queries of each sequence over its own history, where that lies: histories are not copied, and nothing behind them is read. What
// becomes of a sequence follows from its own numbers alone: no product is shared among threads, where the BLAS can be told so.
#include "group.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>

// Of the BLAS that libtorch was built with, where it lets others have it: out = alpha op(a) op(b) + beta out, column by column.
extern "C" __attribute__((weak)) void sgemm_(
    const char* op_a, const char* op_b, const int* m, const int* n, const int* k, const float* alpha, const float* a,
    const int* lda, const float* b, const int* ldb, const float* beta, float* out, const int* ldout);

// MKL's, where that is the BLAS: how many threads the calling one may take for a product; gives what was set before, 0 for nothing.
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int threads);

namespace {

// One sequence's queries, and the row of the pool that holds its history.
struct HistoryChunk {
  const at::Tensor *keys, *values;  // [rows, capacity, G, D]
  int64_t row, past, len;
  int64_t first;  // of its rows in q
};

// While it lives, the calling thread's products are its own. Those of a lone sequence and a lone head of keys would be shared among all threads, and on a
// processor without AVX-512 they had other bits then than among others' products, each of which is one thread's: 4.5e-7 of a state.
struct OwnProducts {
  int before = MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0;
  OwnProducts() = default;
  OwnProducts(const OwnProducts&) = delete;
  OwnProducts& operator=(const OwnProducts&) = delete;
  ~OwnProducts() {
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before);
  }
};

// Turns scores into weights without dividing them by their sum, which it gives.
DEEPSPEC_VECTORS float weigh(float* scores, int64_t count) {
  const float most = largest(scores, count);
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float weight = exponential(scores[i + lane] - most);
      scores[i + lane] = weight;
      lanes[lane] += weight;
    }
  for (; i < count; ++i) {
    scores[i] = exponential(scores[i] - most);
    lanes[0] += scores[i];
  }
  return folded(lanes);
}

struct Reading {
  const float *q, *k, *v;  // [N, H, D], [N, G, D] twice
  float* out;              // [N, H, D]
  int64_t heads, groups, dim;
  float scale;
  int64_t window;  // keys that a query sees; 0 for all before it
  bool causal;     // else a query sees all of its chunk
  const HistoryChunk* chunks;

  // The queries of chunk `task / groups` that share a head of keys.
  void attend(int64_t task) const {
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
    // Kept from call to call; parts begin where vectors do.
    static thread_local std::vector<float> memory;
    const auto whole = [](int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; };
    const int64_t states = whole(rows * dim);
    memory.resize(kLanes + 2 * states + whole(rows) + rows * seen);
    const auto off = reinterpret_cast<uintptr_t>(memory.data()) / sizeof(float) % kLanes;
    float* queries = memory.data() + (kLanes - off) % kLanes;
    float *sums = queries + states, *totals = sums + states, *scores = totals + whole(rows);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t head = group * repeats + row % repeats;
      std::memcpy(queries + row * dim, q + ((chunk.first + row / repeats) * heads + head) * dim, dim * sizeof(float));
    }
    multiply('T', seen, rows, dim, scale, keys + before * step, step, queries, dim, scores);
    for (int64_t row = 0; row < rows; ++row) {
      float* own = scores + row * seen;
      const int64_t position = chunk.past + row / repeats;
      const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, position + 1 - window - before);
      const int64_t end = causal ? position + 1 - before : seen;
      totals[row] = weigh(own + first, end - first);
      std::fill(own, own + first, 0.0f);
      std::fill(own + end, own + seen, 0.0f);
    }
    multiply('N', dim, rows, seen, 1.0f, values + before * step, step, scores, seen, sums);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t head = group * repeats + row % repeats;
      float* to = out + ((chunk.first + row / repeats) * heads + head) * dim;
      const float factor = 1.0f / totals[row];
      for (int64_t i = 0; i < dim; ++i) to[i] = sums[row * dim + i] * factor;
    }
  }

  // out [n, m] = alpha b [n, k] op(a), for a [m, k] ('T') or [k, m] ('N') whose rows lie `lda` apart.
  static void multiply(
      char op, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b, int64_t ldb,
      float* out) {
    const char plain = 'N';
    const int sizes[] = {static_cast<int>(m), static_cast<int>(n), static_cast<int>(k)};
    const int steps[] = {static_cast<int>(lda), static_cast<int>(ldb)};
    const float zero = 0.0f;
    sgemm_(&op, &plain, &sizes[0], &sizes[1], &sizes[2], &alpha, a, &steps[0], b, &steps[1], &zero, out, &sizes[0]);
  }
};

}  // namespace

extern "C" {

bool ds_has_history_attention() {
  return sgemm_ != nullptr;
}

// Stores k and v [N, G, D] in the chunks' histories and gives what their queries q [N, H, D] see there, [N, H, D]; zeros in rows of no chunk.
// Everything was checked before.
char* ds_history_attention(
    const at::Tensor* q, const at::Tensor* k, const at::Tensor* v, const HistoryChunk* chunks, size_t count, double scale,
    int64_t window, bool causal, at::Tensor** result) {
  return caught([&] {
    RECORD_USER_SCOPE("history_attention");
    at::Tensor out = at::zeros_like(*q);
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
    const OwnProducts own;
    for_tasks(static_cast<int64_t>(count) * k->size(1), 1, [&](int64_t task) { reading.attend(task); });
    *result = new at::Tensor(std::move(out));
  });
}
}
