// Matmuls of float32 matrices that require gradients, on x86 processors with AVX2 and without AVX-512. On such AMD
// processors MKL uses separate routines. On a Zen 3 they reach six to seven tenths of the peak, and these kernels reach
// eight to nine. Matrices that cannot be read in place are copied in blocks, in the order in which they are read.
//
// Each value is a sum of chains of fused multiply-adds, `kDepth` inputs each, in order. Its bits depend neither on
// other rows or columns nor on the number of threads.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include "group.h"
#include "operators.h"
#include "tiles.h"

#if DEEPSPEC_TILES
#include <immintrin.h>
#endif

namespace {

// A matrix or its transpose; `down` and `across` are its strides.
struct Factor {
  const float* at;
  int64_t down, across;
};

// Rows and columns of the output tile whose sums stay in registers.
constexpr int64_t kRows = 6, kColumns = 16;
// Block sizes: a panel is kDepth inputs of kColumns columns and fits the L1 cache; all panels of a block fit the L2
// cache.
constexpr int64_t kDepth = 256, kBlockRows = 192, kBlockColumns = 256;
// From this many multiply-adds on, the copies pay off.
constexpr int64_t kWorthwhile = 1 << 13;

[[maybe_unused]] int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

#if DEEPSPEC_TILES
#define DEEPSPEC_AVX2_INLINE inline DEEPSPEC_AVX2 __attribute__((always_inline))

// Transposes 8 values of each of kSide lines, `line` floats apart, into 8 groups of kSide values, `step` floats apart.
// If kSide is less than 8, each group overwrites the beginning of the next one, which is stored later. The last group
// overwrites nothing.
template <int64_t kSide>
DEEPSPEC_AVX2_INLINE void turn(const float* from, int64_t line, float* to, int64_t step) {
  static_assert(kSide == 6 || kSide == 8);
  __m256 lines[8], pairs[8], turned[8];
  for (int i = 0; i < 8; ++i) lines[i] = i < kSide ? _mm256_loadu_ps(from + i * line) : _mm256_setzero_ps();
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(lines[i], lines[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(lines[i], lines[i + 1]);
  }
  for (int half = 0; half < 8; half += 4) {
    turned[half] = _mm256_shuffle_ps(pairs[half], pairs[half + 2], 0x44);
    turned[half + 1] = _mm256_shuffle_ps(pairs[half], pairs[half + 2], 0xee);
    turned[half + 2] = _mm256_shuffle_ps(pairs[half + 1], pairs[half + 3], 0x44);
    turned[half + 3] = _mm256_shuffle_ps(pairs[half + 1], pairs[half + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) _mm256_storeu_ps(to + i * step, _mm256_permute2f128_ps(turned[i], turned[4 + i], 0x20));
  for (int i = 0; i < 4; ++i) {
    const __m256 group = _mm256_permute2f128_ps(turned[i], turned[4 + i], 0x31);
    if (i == 3 && kSide < 8) {
      alignas(32) float last[8];
      _mm256_store_ps(last, group);
      std::memcpy(to + 7 * step, last, kSide * sizeof(float));
    } else {
      _mm256_storeu_ps(to + (4 + i) * step, group);
    }
  }
}

// Copies a group of kSide contiguous values with vector instructions.
template <int64_t kSide>
DEEPSPEC_AVX2_INLINE void copy_group(const float* from, float* to) {
  static_assert(kSide == 6 || kSide % 8 == 0);
  constexpr int64_t kWhole = kSide / 8 * 8;
#pragma GCC unroll 4
  for (int64_t i = 0; i < kWhole; i += 8) _mm256_storeu_ps(to + i, _mm256_loadu_ps(from + i));
  if constexpr (kSide == 6) {
    _mm_storeu_ps(to, _mm_loadu_ps(from));
    std::memcpy(to + 4, from + 4, 2 * sizeof(float));
  }
}

// Copies `count` lines of `depth` inputs into panels of kSide lines, [inputs, kSide] each, one after the other. `line`
// and `input` are the strides of `from`. Missing lines of the last panel become zeros.
template <int64_t kSide>
DEEPSPEC_AVX2_INLINE void pack(const float* from, int64_t line, int64_t input, int64_t count, int64_t depth, float* to) {
  // Contiguous lines are read in long pieces, for few panels at a time. Panels of kDepth inputs are a large power of
  // two apart. If more panels were written in turn, cache lines would be evicted before they are full.
  constexpr int64_t kTogether = (kSide == kRows ? 8 : 4) * kSide;
  // Inputs that are prefetched ahead of the copy.
  constexpr int64_t kSoon = 8;
  for (int64_t first = 0; first < count; first += kTogether) {
    const int64_t lines = std::min(kTogether, count - first), whole = lines / kSide * kSide;
    const float* source = from + first * line;
    float* panels = to + first * depth;
    if (line == 1) {
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t i = 0; i < lines; i += Ahead::kLine) _mm_prefetch(source + (k + kSoon) * input + i, _MM_HINT_T0);
        for (int64_t i = 0; i < whole; i += kSide) copy_group<kSide>(source + k * input + i, panels + i * depth + k * kSide);
      }
    } else {
      for (int64_t i = 0; i < whole; i += kSide) {
        const float* at = source + i * line;
        float* panel = panels + i * depth;
        int64_t k = 0;
        for (; input == 1 && k + 8 <= depth; k += 8) {
          for (int64_t j = 0; j < kSide; ++j) _mm_prefetch(at + (kSide + j) * line + k, _MM_HINT_T0);
          for (int64_t j = 0; j < kSide / 8 * 8; j += 8) turn<8>(at + j * line + k, line, panel + k * kSide + j, kSide);
          if constexpr (kSide == kRows) turn<kRows>(at + k, line, panel + k * kSide, kSide);
        }
        for (; k < depth; ++k)
          for (int64_t j = 0; j < kSide; ++j) panel[k * kSide + j] = at[j * line + k * input];
      }
    }
    if (whole < lines) {
      float* panel = panels + whole * depth;
      const float* at = source + whole * line;
      int64_t k = 0;
      // Goes through a buffer in which the missing lines are zero.
      float some[kSide * 8] = {};
      for (; input == 1 && k + 8 <= depth; k += 8) {
        for (int64_t j = 0; j < lines - whole; ++j) std::memcpy(some + j * 8, at + j * line + k, 8 * sizeof(float));
        for (int64_t j = 0; j < kSide / 8 * 8; j += 8) turn<8>(some + j * 8, 8, panel + k * kSide + j, kSide);
        if constexpr (kSide == kRows) turn<kRows>(some, 8, panel + k * kSide, kSide);
      }
      for (; k < depth; ++k)
        for (int64_t j = 0; j < kSide; ++j) panel[k * kSide + j] = whole + j < lines ? at[j * line + k * input] : 0.0f;
    }
  }
}

// kRows rows, with strides `down` and `across`, times a panel of columns. Overwrites `out`, whose rows are `line`
// floats apart, or adds to it.
DEEPSPEC_AVX2_INLINE void tile(
    const float* rows, int64_t down, int64_t across, const float* columns, int64_t depth, float* out, int64_t line, bool add) {
  __m256 sums[kRows][2];
#pragma GCC unroll 6
  for (int64_t r = 0; r < kRows; ++r) {
    _mm_prefetch(out + r * line, _MM_HINT_T0);
    _mm_prefetch(out + r * line + kColumns - 1, _MM_HINT_T0);
    sums[r][0] = sums[r][1] = _mm256_setzero_ps();
  }
  // If another program runs on the same core, instruction throughput is the bottleneck. So there are few instructions
  // besides the multiply-adds: a pointer to every third row makes address computations unnecessary.
  const float *top = rows, *bottom = rows + 3 * down;
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k, columns += kColumns, top += across, bottom += across) {
    const __m256 left = _mm256_loadu_ps(columns), right = _mm256_loadu_ps(columns + 8);
#pragma GCC unroll 6
    for (int64_t r = 0; r < kRows; ++r) {
      const __m256 value = _mm256_broadcast_ss(r < 3 ? top + r * down : bottom + (r - 3) * down);
      sums[r][0] = _mm256_fmadd_ps(value, left, sums[r][0]);
      sums[r][1] = _mm256_fmadd_ps(value, right, sums[r][1]);
    }
  }
#pragma GCC unroll 6
  for (int64_t r = 0; r < kRows; ++r) {
    float* to = out + r * line;
    if (add) {
      sums[r][0] = _mm256_add_ps(_mm256_loadu_ps(to), sums[r][0]);
      sums[r][1] = _mm256_add_ps(_mm256_loadu_ps(to + 8), sums[r][1]);
    }
    _mm256_storeu_ps(to, sums[r][0]);
    _mm256_storeu_ps(to + 8, sums[r][1]);
  }
}

// A part of a product with `width` columns, which overwrites `out` or is added to it. `line` is the stride between its
// rows.
struct Patch {
  float* out;
  int64_t line, width, inputs;
  bool add;

  // Computes at most kRows rows from row i and column j on. The rows are read in place, `down` floats apart, or from a
  // panel.
  template <bool kInPlace>
  DEEPSPEC_AVX2_INLINE void fill(int64_t i, int64_t j, int64_t rows, const float* from, int64_t down, const float* of_columns) const {
    float* to = out + i * line + j;
    const float* panel = of_columns + j * inputs;
    const int64_t across = kInPlace ? 1 : kRows, columns = std::min(kColumns, width - j);
    if (!kInPlace) down = 1;
    if (rows == kRows && columns == kColumns) return tile(from, down, across, panel, inputs, to, line, add);
    float whole[kRows * kColumns];
    tile(from, down, across, panel, inputs, whole, kColumns, false);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) {
        const float sum = whole[r * kColumns + c];
        to[r * line + c] = add ? to[r * line + c] + sum : sum;
      }
  }
};

// a [rows, depth] times b [depth, columns], which overwrites `out` or is added to it.
struct Multiplication {
  Factor a, b;
  float* out;
  int64_t rows, columns, depth, line;
  bool add;

  // Computes a range of rows and columns.
  DEEPSPEC_AVX2 void run(int64_t first_row, int64_t end_row, int64_t first_column, int64_t end_column) const {
    const int64_t deep = std::min(depth, kDepth);
    const int64_t of_columns_size = rounded_up(std::min(end_column - first_column, kBlockColumns), kColumns) * deep;
    const int64_t of_rows_size = rounded_up(std::min(end_row - first_row, kBlockRows), kRows) * deep;
    // Each thread keeps this memory, because the next block needs it at once.
    static thread_local std::vector<float> space;
    if (space.size() < static_cast<size_t>(of_columns_size + of_rows_size)) space.resize(of_columns_size + of_rows_size);
    float *of_columns = space.data(), *of_rows = of_columns + of_columns_size;
    for (int64_t input = 0; input < depth; input += kDepth) {
      const int64_t inputs = std::min(kDepth, depth - input);
      for (int64_t column = first_column; column < end_column; column += kBlockColumns) {
        const int64_t width = std::min(kBlockColumns, end_column - column);
        pack<kColumns>(b.at + input * b.down + column * b.across, b.across, b.down, width, inputs, of_columns);
        Ahead ahead = behind(input, inputs, column, width, (end_row - first_row + kRows - 1) / kRows);
        for (int64_t row = first_row; row < end_row; row += kBlockRows) {
          const int64_t height = std::min(kBlockRows, end_row - row), whole = height / kRows * kRows;
          const float* from = a.at + row * a.down + input * a.across;
          const Patch patch{out + row * line + column, line, width, inputs, add || input > 0};
          // Rows with contiguous inputs are read in place; each tile prefetches a share of the next rows.
          if (a.across == 1) {
            const int64_t share = rounded_up((inputs * kColumns + width - 1) / width, Ahead::kLine);
            for (int64_t i = 0; i < whole; i += kRows, ahead.fetch()) {
              const float *here = from + i * a.down, *next = here + kRows * a.down;
              for (int64_t j = 0, asked = 0; j < width; j += kColumns) {
                for (const int64_t end = std::min(inputs, asked + share); asked < end; asked += Ahead::kLine)
                  for (int64_t r = 0; r < kRows; ++r) _mm_prefetch(next + r * a.down + asked, _MM_HINT_T0);
                patch.fill<true>(i, j, kRows, here, a.down, of_columns);
              }
            }
            pack<kRows>(from + whole * a.down, a.down, 1, height - whole, inputs, of_rows);
            for (int64_t j = 0; whole < height && j < width; j += kColumns)
              patch.fill<false>(whole, j, height - whole, of_rows, 1, of_columns);
          } else {
            pack<kRows>(from, a.down, a.across, height, inputs, of_rows);
            for (int64_t j = 0; j < width; j += kColumns)
              for (int64_t i = 0; i < height; i += kRows)
                patch.fill<false>(i, j, std::min(kRows, height - i), of_rows + i * inputs, 1, of_columns);
          }
        }
      }
    }
  }

  // The part of b that follows this block in memory and is copied next, for prefetching in `turns` steps.
  Ahead behind(int64_t input, int64_t inputs, int64_t column, int64_t width, int64_t turns) const {
    const float *from = nullptr, *end = nullptr;
    if (b.across == 1 && b.down == width && width == columns) {
      from = b.at + (input + inputs) * b.down, end = from + std::min(kDepth, depth - input - inputs) * b.down;
    } else if (b.down == 1 && b.across == inputs && inputs == depth) {
      from = b.at + (column + width) * b.across, end = from + std::min(kBlockColumns, columns - column - width) * b.across;
    }
    return {from, end, (end - from) / (Ahead::kLine * turns) + 1};
  }

  // Computes the whole product; the threads split the longer side.
  void run_all() const {
    const bool by_rows = rows > columns;
    const int64_t side = by_rows ? rows : columns, unit = by_rows ? kRows : kColumns;
    const int64_t most = std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), rows * columns * depth / kWork));
    const int64_t length = std::max(unit, rounded_up((side + most - 1) / most, unit)), pieces = (side + length - 1) / length;
    for_tasks(pieces, 1, [&](int64_t piece) {
      const int64_t first = piece * length, end = std::min(side, first + length);
      if (by_rows)
        run(first, end, 0, columns);
      else
        run(0, rows, first, end);
    });
  }
};

#endif

// Whether the processor supports these kernels.
[[maybe_unused]] bool has_avx2() { return tile_level() >= kAvx2; }

// Whether these kernels are the better choice on this processor.
bool multiplies_here() { return tile_level() == kAvx2; }

[[maybe_unused]] Factor factor(const at::Tensor& matrix) { return {matrix.const_data_ptr<float>(), matrix.stride(0), matrix.stride(1)}; }

bool float_matrix(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat && tensor.dim() == 2;
}

// Whether these kernels can compute a [m, k] times b [k, n] and it is large enough for them.
bool multipliable(const at::Tensor& a, const at::Tensor& b) {
  return float_matrix(a) && float_matrix(b) && a.size(1) == b.size(0) && b.size(1) >= kColumns / 2 &&
         a.size(0) * a.size(1) * b.size(1) >= kWorthwhile;
}

// a times b, which overwrites `out` or is added to it; rows of `out` are contiguous. The caller has checked the
// arguments.
void multiply(
    [[maybe_unused]] const at::Tensor& a, [[maybe_unused]] const at::Tensor& b, [[maybe_unused]] const at::Tensor& out,
    [[maybe_unused]] bool add) {
#if DEEPSPEC_TILES
  RECORD_USER_SCOPE("multiply");
  Multiplication{factor(a), factor(b), out.mutable_data_ptr<float>(), a.size(0), b.size(1), a.size(1), out.stride(0), add}
      .run_all();
#endif
}

// a times b: by these kernels if `here` is set, which requires AVX2, else by libtorch.
at::Tensor times(const at::Tensor& a, const at::Tensor& b, bool here) {
  if (!here || !multipliable(a, b)) return a.mm(b);
  at::Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
  multiply(a, b, out, false);
  return out;
}

// The gradient of a weight [outputs, d], given the gradient [n, outputs] of its products with x [n, d]. A parameter's
// gradient is added to its `grad` directly, without a temporary tensor, and autograd receives nothing. So gradients of
// parameters are available only by `backward`, on one thread. A parameter without a `grad` gets zeros first, so that
// its sums equal those after zeroing the gradients.
at::Tensor weight_slope(const at::Tensor& slope, const at::Tensor& x, const at::Tensor& weight, bool here) {
  const at::Tensor turned = slope.t();
  if (!here || !weight.is_leaf() || !multipliable(turned, x) || (weight.grad().defined() && !plain(weight.grad()))) return times(turned, x, here);
  if (!weight.grad().defined()) weight.mutable_grad() = at::zeros(weight.sizes(), weight.options());
  const at::Tensor& sum = weight.grad();
  multiply(turned, x, sum, true);
  sum.unsafeGetTensorImpl()->bump_version();
  return {};
}

// x [.., d] times the transpose of a weight [outputs, d]. The result is not a view: autograd forbids in-place changes
// of views that a function returns.
at::Tensor projected(const at::Tensor& x, const at::Tensor& weight, bool here) {
  std::vector<int64_t> size = x.sizes().vec();
  size.back() = weight.size(0);
  return at::_unsafe_view(times(x.reshape({-1, weight.size(1)}), weight.t(), here), size);
}

struct Projection : torch::autograd::Function<Projection> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight) {
    ctx->save_for_backward({weight.requires_grad() ? x : at::Tensor(), weight});
    ctx->saved_data["size"] = x.sizes();
    return projected(x, weight, true);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx, const torch::autograd::variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], slope = gradients[0].reshape({-1, weight.size(0)});
    at::Tensor by_x, by_weight;
    if (ctx->needs_input_grad(0)) by_x = times(slope, weight, true).view(ctx->saved_data["size"].toIntVector());
    if (ctx->needs_input_grad(1)) by_weight = weight_slope(slope, x.reshape({-1, weight.size(1)}), weight, true);
    return {by_x, by_weight};
  }
};

}  // namespace

extern "C" {

// Whether this processor computes matmuls by these kernels.
bool ds_multiplies() { return multiplies_here(); }

// a [m, k] times b [k, n], which overwrites `out` or is added to it. `*done` says whether the tensors are supported.
// `out` must not share memory with a or b.
char* ds_multiply(const at::Tensor* a, const at::Tensor* b, const at::Tensor* out, bool add, bool* done) {
  *done = false;
  return caught([&] {
    if (!has_avx2() || !float_matrix(*a) || !float_matrix(*b) || !float_matrix(*out) || a->size(1) != b->size(0)) return;
    if (out->size(0) != a->size(0) || out->size(1) != b->size(1) || out->stride(1) != 1) return;
    if (a->size(1) == 0 || out->numel() == 0) return;
    multiply(*a, *b, *out, add);
    *done = true;
  });
}

// x [.., d] times the transpose of a weight [outputs, d]; null if no gradient is required or the processor lacks AVX2.
at::Tensor* ds_projection(const at::Tensor* x, const at::Tensor* weight) {
  return made([&]() -> at::Tensor {
    if (!has_avx2() || !plain(*x) || !plain(*weight) || weight->dim() != 2 || x->dim() == 0) return {};
    if (weight->numel() == 0 || x->size(-1) != weight->size(1) || (!learns(*x) && !learns(*weight))) return {};
    if (!multipliable(x->view({-1, weight->size(1)}), weight->t())) return {};
    return Projection::apply(*x, *weight);
  });
}
}
