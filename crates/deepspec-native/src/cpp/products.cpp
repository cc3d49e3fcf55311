// Products of float32 rows with weights that were packed for them, on processors of x86 with AVX2 or AVX-512. Each value is one chain of fused
// multiply-adds over the inputs in their order, so that a row's bits do not depend on how many rows it comes with; and weights are read in the order
// in which they lie, which is what few rows wait for.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define DEEPSPEC_PACKS 1
#else
#define DEEPSPEC_PACKS 0
#endif

namespace {

// Instructions that products are compiled for.
enum Level : int32_t { kNone, kAvx2, kAvx512 };

#if DEEPSPEC_PACKS

// Outputs that lie side by side: panels are [input, kPanel], one behind the other.
constexpr int64_t kPanel = 32;
// Rows that a task multiplies by one panel: the panel stays in the first caches meanwhile, the rows in the next one.
constexpr int64_t kPass = 128;

typedef float Middle __attribute__((vector_size(32)));
typedef float Wide __attribute__((vector_size(64)));

struct Product {
  const float* x;       // [rows, width]
  const float* panels;  // [panels, width, kPanel]
  float* out;           // [rows, outputs]
  int64_t rows, width, outputs;

  int64_t panel_count() const { return (outputs + kPanel - 1) / kPanel; }
  int64_t task_count() const { return (rows + kPass - 1) / kPass * panel_count(); }

  // One panel and all rows of one pass; panels go round within a pass.
  template <typename Vector>
  inline __attribute__((always_inline)) void run(int64_t task) const {
    // So many rows' sums, two vectors each, stay in registers: of the wide ones there are 32, of the others 16.
    constexpr int64_t kMost = sizeof(Vector) == sizeof(Wide) ? 8 : 6;
    const int64_t panel = task % panel_count(), end = std::min(rows, (task / panel_count() + 1) * kPass);
    for (int64_t row = task / panel_count() * kPass, count; row < end; row += count) {
      const int64_t left = end - row;
      count = left > kMost && left < 2 * kMost ? (left + 1) / 2 : std::min(left, kMost);
      switch (count) {
        case 1: tile<Vector, 1>(row, panel); break;
        case 2: tile<Vector, 2>(row, panel); break;
        case 3: tile<Vector, 3>(row, panel); break;
        case 4: tile<Vector, 4>(row, panel); break;
        case 5: tile<Vector, 5>(row, panel); break;
        case 6: tile<Vector, 6>(row, panel); break;
        case 7: tile<Vector, 7>(row, panel); break;
        default: tile<Vector, 8>(row, panel);
      }
    }
  }

  // So many rows from `row` on, and the outputs of a panel.
  template <typename Vector, int kRows>
  inline __attribute__((always_inline)) void tile(int64_t row, int64_t panel) const {
    constexpr int64_t kLength = sizeof(Vector) / sizeof(float);
    const float *in = x + row * width, *weights = panels + panel * width * kPanel;
    for (int64_t first = 0; first < kPanel; first += 2 * kLength) {
      const int64_t output = panel * kPanel + first, kept = std::min(2 * kLength, outputs - output);
      if (kept <= 0) return;  // padding
      Vector sums[kRows][2] = {};
      for (int64_t i = 0; i < width; ++i) {
        Vector pair[2];
        std::memcpy(&pair[0], weights + i * kPanel + first, sizeof(Vector));
        std::memcpy(&pair[1], weights + i * kPanel + first + kLength, sizeof(Vector));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          sums[r][0] += in[r * width + i] * pair[0];
          sums[r][1] += in[r * width + i] * pair[1];
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        float *to = out + (row + r) * outputs + output, whole[2 * kLength];
        float* at = kept == 2 * kLength ? to : whole;
        std::memcpy(at, &sums[r][0], sizeof(Vector));
        std::memcpy(at + kLength, &sums[r][1], sizeof(Vector));
        if (at == whole) std::memcpy(to, whole, kept * sizeof(float));
      }
    }
  }
};

__attribute__((target("avx2,fma"))) void run_middle(const Product& product, int64_t task) { product.run<Middle>(task); }
__attribute__((target("avx512f"))) void run_wide(const Product& product, int64_t task) { product.run<Wide>(task); }

#endif

}  // namespace

extern "C" {

// The highest level of this processor.
int32_t ds_product_level() {
#if DEEPSPEC_PACKS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
  return kNone;
}

// x [rows, width] times the transpose of a weight [outputs, width] in panels: [rows, outputs], by the instructions of a level that the processor has.
// Everything was checked before.
char* ds_product(const at::Tensor* x, const at::Tensor* panels, int64_t outputs, int32_t level, at::Tensor** result) {
  return caught([&] {
#if DEEPSPEC_PACKS
    RECORD_USER_SCOPE("packed_product");
    at::Tensor out = at::empty({x->size(0), outputs}, x->options());
    const Product product{
        x->const_data_ptr<float>(), panels->const_data_ptr<float>(), out.mutable_data_ptr<float>(), x->size(0),
        x->size(1), outputs};
    const int64_t work = std::max<int64_t>(1, std::min(product.rows, kPass) * product.width * kPanel);
    const auto run = level == kAvx512 ? run_wide : run_middle;
    for_tasks(product.task_count(), std::max<int64_t>(1, kWork / work), [&](int64_t task) { run(product, task); });
    *result = new at::Tensor(std::move(out));
#else
    TORCH_CHECK(false, "built for another processor");
#endif
  });
}
}
