// Attention of blocks behind anchors, block by block: a block's scores, of so many rows as it has queries, stay in a cache, forwards and
// backwards, and nothing of them is kept. For float32 on the processors that matrices.cpp is for, whose panels and tiles it takes; libtorch's
// fused kernels ask MKL for many small products there. The backward uses at most as many threads as there are heads of keys.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

namespace {

// Which keys the blocks see: those of the context before their anchors, and behind a slot's position less the window, in keys, where there is one.
struct Seen : torch::CustomClassHolder {
  std::vector<int64_t> anchors;
  int64_t window = std::numeric_limits<int64_t>::max();
  double scale = 1.0;
};

#if DEEPSPEC_TILES

// Leaves new values as they lie: who takes it writes all of them.
template <typename Value>
struct Unset : std::allocator<Value> {
  Unset() = default;
  template <typename Other>
  Unset(const Unset<Other>&) noexcept {}
  template <typename Other>
  struct rebind {
    using other = Unset<Other>;
  };
  template <typename Other>
  void construct(Other* at) noexcept {
    ::new (static_cast<void*>(at)) Other;
  }
};
using Floats = std::vector<float, Unset<float>>;

// Keys, or their values, as products read them: in panels of kColumns keys for products with queries, of kColumns values for sums over keys.
struct Panels {
  Floats by_key, by_value;

  // Of `keys` rows of `dim` values, `line` apart; what is read behind the last row is zero, or other rows'.
  DEEPSPEC_AVX2 void copy_keys(const float* from, int64_t line, int64_t keys, int64_t dim) {
    by_key.resize(rounded_up(keys, kColumns) * dim);
    pack<kColumns>(from, line, 1, keys, dim, by_key.data());
  }
  DEEPSPEC_AVX2 void copy_values(const float* from, int64_t line, int64_t keys, int64_t dim) {
    by_value.resize((keys + kColumns) * dim);
    pack<kColumns>(from, 1, line, dim, keys, by_value.data());
    std::fill(by_value.begin() + keys * dim, by_value.end(), 0.0f);
  }
};

// All blocks of one sequence: queries [G, A, r, D], of which `size` follow one another in a block, keys and values [G, T, D] and [G, A, size, D].
struct Blocks {
  const at::Tensor &q, &k, &v, &own_k, &own_v;
  const Seen& seen;
  int64_t rows = q.size(2), dim = q.size(3), size = own_k.size(2), tokens = k.size(1);
  // Columns of the block's own keys, which come first.
  int64_t own = rounded_up(size, kColumns);

  const float* context(const at::Tensor& of, int64_t group) const { return of.const_data_ptr<float>() + group * of.stride(0); }
  const float* of_block(const at::Tensor& of, int64_t group, int64_t block) const {
    return of.const_data_ptr<float>() + group * of.stride(0) + block * of.stride(1);
  }
};

// What one block works with. Scores are [rows, line]: the block's own keys, those of the context from `first` on, and zeros.
struct BlockAtWork {
  const Blocks& all;
  int64_t group, number, anchor, first, width, line, padded_rows;
  Floats queries;
  Panels own_k, own_v;

  DEEPSPEC_AVX2 BlockAtWork(const Blocks& all, int64_t group, int64_t number) : all(all), group(group), number(number) {
    anchor = all.seen.anchors[number];
    // Of the first slot, which sees most.
    const int64_t before = anchor - std::min(anchor, all.seen.window - 1);
    first = before / kColumns * kColumns;
    width = rounded_up(anchor, kColumns) - first;
    line = all.own + width + kColumns;
    padded_rows = rounded_up(all.rows, kRows);
    queries = padded(all.of_block(all.q, group, number), static_cast<float>(all.seen.scale));
  }

  // Rows of the block times a factor, with rows of zeros behind them.
  Floats padded(const float* from, float factor) const {
    Floats copy(padded_rows * all.dim);
    for (int64_t i = 0; i < all.rows * all.dim; ++i) copy[i] = from[i] * factor;
    std::fill(copy.begin() + all.rows * all.dim, copy.end(), 0.0f);
    return copy;
  }

  // Products of rows with all keys that the block may see, or with their values: [padded_rows, line].
  DEEPSPEC_AVX2 Floats by_key(const Floats& left, const Panels& of_own, const Panels& of_context) const {
    Floats out(padded_rows * line);
    for (int64_t row = 0; row < padded_rows; ++row) std::fill_n(out.data() + (row + 1) * line - kColumns, kColumns, 0.0f);
    for (int64_t column = 0; column < all.own + width; column += kColumns) {
      const float* panel = column < all.own ? of_own.by_key.data() + column * all.dim
                                            : of_context.by_key.data() + (first + column - all.own) * all.dim;
      for (int64_t row = 0; row < padded_rows; row += kRows)
        tile(left.data() + row * all.dim, all.dim, 1, panel, all.dim, out.data() + row * line + column, line, false);
    }
    return out;
  }

  // Sums over keys of weights [padded_rows, line] times what belongs to the keys: [padded_rows, D].
  DEEPSPEC_AVX2 Floats over_keys(const Floats& weights, const Panels& of_own, const Panels& of_context) const {
    Floats out(padded_rows * all.dim);
    for (int64_t row = 0; row < padded_rows; row += kRows)
      for (int64_t column = 0; column < all.dim; column += kColumns) {
        const float* left = weights.data() + row * line;
        float* to = out.data() + row * all.dim + column;
        tile(left, line, 1, of_own.by_value.data() + column * all.size, all.size, to, all.dim, false);
        tile(left + all.own, line, 1, of_context.by_value.data() + column * all.tokens + first * kColumns, width, to, all.dim, true);
      }
    return out;
  }

  // Sums over rows of weights times `right`, panels of kColumns of its values: [size, D] to `of_own` and added to [T, D], some rows more each.
  DEEPSPEC_AVX2 void over_rows(const Floats& weights, const Floats& right, float* of_own, float* of_context) const {
    for (int64_t column = 0; column < all.dim; column += kColumns) {
      const float* panel = right.data() + column * all.rows;
      for (int64_t key = 0; key < all.size; key += kRows)
        tile(weights.data() + key, 1, line, panel, all.rows, of_own + key * all.dim + column, all.dim, false);
      for (int64_t key = 0; key < width; key += kRows)
        tile(weights.data() + all.own + key, 1, line, panel, all.rows, of_context + (first + key) * all.dim + column, all.dim, true);
    }
  }

  // Calls `each(row, from, to)` for the ranges of columns that a row does not see.
  template <typename Each>
  void for_hidden(int64_t row, Each each) const {
    const int64_t slot = row % all.size, position = anchor + slot;
    const int64_t behind = position - std::min(position + 1, all.seen.window);  // the last one that the window hides, or -1
    const int64_t own_behind = std::max<int64_t>(0, behind - anchor + 1);
    each(0, std::min(own_behind, all.size));
    each(all.size, all.own);
    each(all.own, all.own + std::clamp<int64_t>(behind + 1 - first, 0, width));
    each(all.own + anchor - first, line);
  }

  // Copies the block's own keys and values, where products read them.
  void copy_own(bool for_backward) {
    const float *k = all.of_block(all.own_k, group, number), *v = all.of_block(all.own_v, group, number);
    own_k.copy_keys(k, all.own_k.stride(2), all.size, all.dim);
    own_v.copy_values(v, all.own_v.stride(2), all.size, all.dim);
    if (!for_backward) return;
    own_k.copy_values(k, all.own_k.stride(2), all.size, all.dim);
    own_v.copy_keys(v, all.own_v.stride(2), all.size, all.dim);
  }
};

// A row's scores to weights, which are not divided by their sum yet; gives that sum and the largest score.
DEEPSPEC_VECTORS void weigh_row(float* row, int64_t count, float* sum, float* most) {
  const float top = largest(row, count);
  for (int64_t i = 0; i < count; ++i) row[i] = exponential(row[i] - top);
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += row[i + lane];
  *sum = folded(lanes), *most = top;
}

// A row's scores to weights.
DEEPSPEC_VECTORS void weigh_row_again(float* row, int64_t count, float lse) {
  for (int64_t i = 0; i < count; ++i) row[i] = exponential(std::min(0.0f, row[i] - lse));
}

// Slopes of weights to slopes of scores.
DEEPSPEC_VECTORS void slope_scores(const float* weights, float* slopes, int64_t count, float mean) {
  for (int64_t i = 0; i < count; ++i) slopes[i] = weights[i] * (slopes[i] - mean);
}

DEEPSPEC_VECTORS float inner_product(const float* a, const float* b, int64_t count) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  for (; i < count; ++i) lanes[0] += a[i] * b[i];
  return folded(lanes);
}

// Output of one block [r, D], and the log-sum-exp of its rows' scores.
void attend_block(BlockAtWork&& block, const Panels& k, const Panels& v, float* out, float* lse) {
  const Blocks& all = block.all;
  block.copy_own(false);
  Floats weights = block.by_key(block.queries, block.own_k, k), sums(all.rows);
  for (int64_t row = 0; row < all.rows; ++row) {
    float *of_row = weights.data() + row * block.line, most;
    block.for_hidden(row, [&](int64_t from, int64_t to) { std::fill(of_row + from, of_row + std::max(from, to), kLowest); });
    weigh_row(of_row, block.line, &sums[row], &most);
    lse[row] = most + std::log(sums[row]);
  }
  const Floats found = block.over_keys(weights, block.own_v, v);
  for (int64_t row = 0; row < all.rows; ++row)
    for (int64_t i = 0; i < all.dim; ++i) out[row * all.dim + i] = found[row * all.dim + i] / sums[row];
}

// Slopes of one block: of its queries, its own keys and values; those of the context are added.
struct Slopes {
  float *q, *own_k, *own_v, *k, *v;
};

DEEPSPEC_AVX2 void go_back(
    BlockAtWork&& block, const Panels& k, const Panels& v, const float* out, const float* lse, const float* slope, Slopes to) {
  const Blocks& all = block.all;
  block.copy_own(true);
  Floats weights = block.by_key(block.queries, block.own_k, k);
  const Floats by_out = block.padded(slope, 1.0f);
  Floats slopes = block.by_key(by_out, block.own_v, v);
  for (int64_t row = 0; row < all.rows; ++row) {
    float *of_row = weights.data() + row * block.line, *by_row = slopes.data() + row * block.line;
    block.for_hidden(row, [&](int64_t from, int64_t to) { std::fill(of_row + from, of_row + std::max(from, to), kLowest); });
    weigh_row_again(of_row, block.line, lse[row]);
    slope_scores(of_row, by_row, block.line, inner_product(slope + row * all.dim, out + row * all.dim, all.dim));
  }
  // Some rows more than the block's own keys are written.
  Floats own(rounded_up(all.size, kRows) * all.dim), panels(all.rows * all.dim);
  const auto over_rows = [&](const Floats& of, const Floats& right, float* to_own, float* to_context) DEEPSPEC_AVX2 {
    pack<kColumns>(right.data(), 1, all.dim, all.dim, all.rows, panels.data());
    block.over_rows(of, panels, own.data(), to_context);
    std::copy_n(own.data(), all.size * all.dim, to_own);
  };
  over_rows(weights, by_out, to.own_v, to.v);
  over_rows(slopes, block.queries, to.own_k, to.k);
  const Floats by_q = block.over_keys(slopes, block.own_k, k);
  const float scale = static_cast<float>(all.seen.scale);
  for (int64_t i = 0; i < all.rows * all.dim; ++i) to.q[i] = by_q[i] * scale;
}

struct BlockByBlock : torch::autograd::Function<BlockByBlock> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& given_q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& own_k, const at::Tensor& own_v, const c10::intrusive_ptr<Seen>& seen) {
    RECORD_USER_SCOPE("block_attention");
    const at::Tensor q = given_q.contiguous(), out = at::empty_like(q), lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options());
    const Blocks all{q, k, v, own_k, own_v, *seen};
    std::vector<Panels> keys(q.size(0)), values(q.size(0));
    for_tasks(q.size(0), 1, [&](int64_t group) {
      keys[group].copy_keys(all.context(k, group), k.stride(1), all.tokens, all.dim);
      values[group].copy_values(all.context(v, group), v.stride(1), all.tokens, all.dim);
    });
    float *to = out.mutable_data_ptr<float>(), *to_lse = lse.mutable_data_ptr<float>();
    for_tasks(q.size(0) * q.size(1), 1, [&](int64_t task) {
      const int64_t group = task / q.size(1);
      attend_block(BlockAtWork(all, group, task % q.size(1)), keys[group], values[group], to + task * all.rows * all.dim, to_lse + task * all.rows);
    });
    ctx->save_for_backward({q, k, v, own_k, own_v, out, lse});
    ctx->saved_data["seen"] = c10::IValue::make_capsule(seen);
    return out;
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx, const torch::autograd::variable_list& gradients) {
    RECORD_USER_SCOPE("block_attention_backward");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &own_k = saved[3], &own_v = saved[4], slope = gradients[0].contiguous();
    const auto seen = c10::static_intrusive_pointer_cast<Seen>(ctx->saved_data["seen"].toCapsule());
    const Blocks all{q, k, v, own_k, own_v, *seen};
    const int64_t groups = q.size(0), blocks = q.size(1), of_block = all.rows * all.dim, of_own = all.size * all.dim;
    const at::Tensor by_q = at::empty_like(q);
    const at::Tensor by_own_k = at::empty({groups, blocks, all.size, all.dim}, q.options()), by_own_v = at::empty_like(by_own_k);
    // Of all blocks of a group in their order. Some rows more than there are tokens are written, with zeros.
    const at::Tensor by_k = at::zeros({groups, all.tokens + kColumns + kRows, all.dim}, q.options()), by_v = at::zeros_like(by_k);
    const float *out = saved[5].const_data_ptr<float>(), *lse = saved[6].const_data_ptr<float>(), *slopes = slope.const_data_ptr<float>();
    float *to_q = by_q.mutable_data_ptr<float>(), *to_own_k = by_own_k.mutable_data_ptr<float>(), *to_own_v = by_own_v.mutable_data_ptr<float>(),
          *to_k = by_k.mutable_data_ptr<float>(), *to_v = by_v.mutable_data_ptr<float>();
    for_tasks(groups, 1, [&](int64_t group) {
      Panels keys, values;
      for (auto [of, panels] : {std::pair{&k, &keys}, std::pair{&v, &values}}) {
        panels->copy_keys(all.context(*of, group), of->stride(1), all.tokens, all.dim);
        panels->copy_values(all.context(*of, group), of->stride(1), all.tokens, all.dim);
      }
      const int64_t context = group * by_k.stride(0);
      for (int64_t block = group * blocks; block < (group + 1) * blocks; ++block)
        go_back(BlockAtWork(all, group, block % blocks), keys, values, out + block * of_block, lse + block * all.rows, slopes + block * of_block,
                {to_q + block * of_block, to_own_k + block * of_own, to_own_v + block * of_own, to_k + context, to_v + context});
    });
    return {by_q, by_k.narrow(1, 0, all.tokens), by_v.narrow(1, 0, all.tokens), by_own_k, by_own_v, at::Tensor()};
  }
};

#endif

}  // namespace

extern "C" {

// Whether blocks of float32 on the CPU are attended to one by one on this processor.
bool ds_attends_by_block(int64_t dim) { return multiplies_here() && dim % kColumns == 0; }

// Attention of q [G, A, r, D] over k and v [G, T, D] before `anchors`, and over own_k and own_v [G, A, B, D], behind a position less `window`.
// The result is a new tensor in `*out`, and null on other devices, of other kinds or widths, and without AVX2.
char* ds_attend_by_block(const at::Tensor* q, const at::Tensor* k, const at::Tensor* v, const at::Tensor* own_k, const at::Tensor* own_v,
                         const int64_t* anchors, size_t count, int64_t window, double scale, at::Tensor** out) {
  return caught([&] {
    *out = nullptr;
#if DEEPSPEC_TILES
    if (!has_avx2() || q->size(-1) % kColumns != 0) return;
    for (const at::Tensor* each : {q, k, v, own_k, own_v})
      if (!each->device().is_cpu() || each->scalar_type() != at::kFloat) return;
    for (const at::Tensor* each : {q, k, v, own_k, own_v}) TORCH_CHECK(each->stride(-1) == 1, "values of a head do not lie side by side");
    TORCH_CHECK(q->dim() == 4 && k->dim() == 3 && own_k->dim() == 4, "tensors of other shapes");
    const int64_t groups = q->size(0), blocks = q->size(1), dim = q->size(3), size = own_k->size(2), tokens = k->size(1);
    TORCH_CHECK(static_cast<int64_t>(count) == blocks && window > 0 && size > 0 && q->size(2) % size == 0, "blocks of another number or size");
    for (const at::Tensor* each : {k, v}) TORCH_CHECK(each->sizes() == at::IntArrayRef({groups, tokens, dim}), "a context of another shape");
    for (const at::Tensor* each : {own_k, own_v})
      TORCH_CHECK(each->sizes() == at::IntArrayRef({groups, blocks, size, dim}), "keys of blocks of another shape");
    auto seen = c10::make_intrusive<Seen>();
    seen->anchors.assign(anchors, anchors + count);
    for (int64_t anchor : seen->anchors) TORCH_CHECK(0 <= anchor && anchor <= tokens, "an anchor behind the context");
    seen->window = window;
    seen->scale = scale;
    *out = new at::Tensor(BlockByBlock::apply(*q, *k, *v, *own_k, *own_v, seen));
#endif
  });
}
}
