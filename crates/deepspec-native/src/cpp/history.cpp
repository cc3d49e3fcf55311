// Attention of a few queries of each sequence over its own history, where that lies: histories are not copied, and nothing behind them is read. What
// becomes of a sequence follows from its own numbers alone: no product is shared among threads, where the BLAS can be told so.
#include "group.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
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

// As many versions as there are widths of vectors, of which the processor's is taken when the program starts.
#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 12
#define DEEPSPEC_VECTORS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DEEPSPEC_VECTORS
#endif

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

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// e^x for x <= 0, to 3 units in the last place; 0 below -87.
inline float exponential(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves whole numbers
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = clamped * 1.44269504f + kRound;
  const float whole = shifted - kRound;
  const float rest = (clamped - whole * 0.693145752f) - whole * 1.42860677e-6f;
  float p = 1.38888889e-3f;
  p = p * rest + 8.33333333e-3f;
  p = p * rest + 4.16666667e-2f;
  p = p * rest + 1.66666667e-1f;
  p = p * rest + 0.5f;
  p = p * rest + 1.0f;
  p = p * rest + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3f800000;  // the whole number stands in the lowest bits
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? 0.0f : p * power;
}

// Turns scores into weights without dividing them by their sum, which it gives.
DEEPSPEC_VECTORS float weigh(float* scores, int64_t count) {
  float lanes[kLanes];
  for (float& lane : lanes) lane = kLowest;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane)
      lanes[lane] = scores[i + lane] > lanes[lane] ? scores[i + lane] : lanes[lane];
  for (; i < count; ++i) lanes[0] = scores[i] > lanes[0] ? scores[i] : lanes[0];
  float most = lanes[0];
  for (float lane : lanes) most = lane > most ? lane : most;
  for (float& lane : lanes) lane = 0.0f;
  for (i = 0; i + kLanes <= count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float weight = exponential(scores[i + lane] - most);
      scores[i + lane] = weight;
      lanes[lane] += weight;
    }
  for (; i < count; ++i) {
    scores[i] = exponential(scores[i] - most);
    lanes[0] += scores[i];
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
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
