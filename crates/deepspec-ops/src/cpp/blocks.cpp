// Attention of draft blocks after their anchors, one block at a time. The scores of a block have only as many rows as
// the block has queries, so they stay in the cache. The backward recomputes them; no scores are saved. This path is for
// float32 on the processors that matrices.cpp targets, and it uses that file's panels and tiles. On these processors
// libtorch's fused kernels call MKL for many small matmuls. The backward uses at most one thread per KV head.
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

// The number of blocks of one sequence and the number of its context tokens.
struct SequenceBlocks {
  int64_t blocks, tokens;
};

// Which keys the blocks see: their own keys, and the context of their sequence before their anchor. With a window, the
// query at position p sees only keys at positions above p - window.
struct Seen : torch::CustomClassHolder {
  std::vector<SequenceBlocks> sequences;
  std::vector<int64_t> anchors;  // one per block, over all sequences
  int64_t window = std::numeric_limits<int64_t>::max();
  double scale = 1.0;
};

#if DEEPSPEC_TILES

// Allocator that leaves new elements uninitialised: its users write all of them.
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

// Keys or values, copied into the panels that the tiles read. `by_key` has panels of kColumns keys, for products with
// queries. `by_value` has panels of kColumns values of a head, for sums over keys.
struct Panels {
  Floats by_key, by_value;

  // `from` has `keys` rows of `dim` values, `line` floats apart. Reads after the last row find zeros or values of
  // other rows.
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

// All blocks of one sequence: queries [A·B, H, D], context keys and values [T, G, D], block keys and values [A·B, G,
// D].
struct Blocks {
  const float *q, *k, *v, *own_k, *own_v;
  const int64_t* anchors;
  const Seen& seen;
  int64_t heads, groups, dim, size, tokens;
  // Rows of a block for one KV head: all positions for its first query head, then all positions for the next one.
  int64_t repeats = heads / groups, rows = repeats * size;
  // Score columns of the block's own keys, which come before the context's.
  int64_t own = rounded_up(size, kColumns);
  // Floats between the keys of one token and of the next one, for one KV head.
  int64_t step = groups * dim;

  // Offset of a block's row in the queries.
  int64_t row(int64_t group, int64_t block, int64_t row) const {
    return ((block * size + row % size) * heads + group * repeats + row / size) * dim;
  }
  // Offset of a block's own keys.
  int64_t own_of(int64_t group, int64_t block) const { return block * size * step + group * dim; }
};

// Scratch memory of one block. Each thread keeps it, because the next block needs it at once.
struct Space {
  Floats queries, by_out, weights, slopes, found, own, panels, sums;
  Panels own_k, own_v;

  static Space& of_thread() {
    static thread_local Space space;
    return space;
  }
};

// One block's computation. Scores are [padded_rows, line]: the block's own keys, the context keys from `first` on, then
// zeros.
struct BlockAtWork {
  const Blocks& all;
  int64_t group, number, anchor, first, width, line, padded_rows;
  Space& space = Space::of_thread();

  DEEPSPEC_AVX2 BlockAtWork(const Blocks& all, int64_t group, int64_t number) : all(all), group(group), number(number) {
    anchor = all.anchors[number];
    // The first position of the block sees the most context.
    const int64_t before = anchor - std::min(anchor, all.seen.window - 1);
    first = before / kColumns * kColumns;
    width = rounded_up(anchor, kColumns) - first;
    line = all.own + width + kColumns;
    padded_rows = rounded_up(all.rows, kRows);
    pad(all.q, static_cast<float>(all.seen.scale), space.queries);
  }

  // Copies the block's rows times a factor and appends rows of zeros.
  DEEPSPEC_AVX2 void pad(const float* from, float factor, Floats& copy) const {
    copy.resize(padded_rows * all.dim);
    for (int64_t row = 0; row < all.rows; ++row) {
      const float* here = from + all.row(group, number, row);
      for (int64_t i = 0; i < all.dim; ++i) copy[row * all.dim + i] = here[i] * factor;
    }
    std::fill(copy.begin() + all.rows * all.dim, copy.end(), 0.0f);
  }

  // Products of rows with all keys, or with all values, that the block may see: [padded_rows, line].
  DEEPSPEC_AVX2 void by_key(const Floats& left, const Panels& of_own, const Panels& of_context, Floats& out) const {
    out.resize(padded_rows * line);
    for (int64_t row = 0; row < padded_rows; ++row) std::fill_n(out.data() + (row + 1) * line - kColumns, kColumns, 0.0f);
    for (int64_t column = 0; column < all.own + width; column += kColumns) {
      const float* panel = column < all.own ? of_own.by_key.data() + column * all.dim
                                            : of_context.by_key.data() + (first + column - all.own) * all.dim;
      for (int64_t row = 0; row < padded_rows; row += kRows)
        tile(left.data() + row * all.dim, all.dim, 1, panel, all.dim, out.data() + row * line + column, line, false);
    }
  }

  // Sums over keys of weights [padded_rows, line] times the keys' vectors: [padded_rows, D].
  DEEPSPEC_AVX2 void over_keys(const Floats& weights, const Panels& of_own, const Panels& of_context, Floats& out) const {
    out.resize(padded_rows * all.dim);
    for (int64_t row = 0; row < padded_rows; row += kRows)
      for (int64_t column = 0; column < all.dim; column += kColumns) {
        const float* left = weights.data() + row * line;
        float* to = out.data() + row * all.dim + column;
        tile(left, line, 1, of_own.by_value.data() + column * all.size, all.size, to, all.dim, false);
        tile(left + all.own, line, 1, of_context.by_value.data() + column * all.tokens + first * kColumns, width, to, all.dim, true);
      }
  }

  // Sums over rows of weights times `right`, which is in panels of kColumns values. [size, D] goes to `of_own`; the
  // context's part is added to `of_context`. Both also touch a few rows after these.
  DEEPSPEC_AVX2 void over_rows(const Floats& weights, const Floats& right, float* of_own, float* of_context) const {
    for (int64_t column = 0; column < all.dim; column += kColumns) {
      const float* panel = right.data() + column * all.rows;
      for (int64_t key = 0; key < all.size; key += kRows)
        tile(weights.data() + key, 1, line, panel, all.rows, of_own + key * all.dim + column, all.dim, false);
      for (int64_t key = 0; key < width; key += kRows)
        tile(weights.data() + all.own + key, 1, line, panel, all.rows, of_context + (first + key) * all.step + column, all.step, true);
    }
  }

  // Calls `each(from, to)` for the ranges of columns that a row does not see.
  template <typename Each>
  void for_hidden(int64_t row, Each each) const {
    const int64_t slot = row % all.size, position = anchor + slot;
    // The last position that the window hides, or -1.
    const int64_t behind = position - std::min(position + 1, all.seen.window);
    const int64_t own_behind = std::max<int64_t>(0, behind - anchor + 1);
    each(0, std::min(own_behind, all.size));
    each(all.size, all.own);
    each(all.own, all.own + std::clamp<int64_t>(behind + 1 - first, 0, width));
    each(all.own + anchor - first, all.own + width);
  }

  // Packs the block's own keys and values into panels.
  void copy_own(bool for_backward) const {
    const int64_t from = all.own_of(group, number);
    space.own_k.copy_keys(all.own_k + from, all.step, all.size, all.dim);
    space.own_v.copy_values(all.own_v + from, all.step, all.size, all.dim);
    if (!for_backward) return;
    space.own_k.copy_values(all.own_k + from, all.step, all.size, all.dim);
    space.own_v.copy_keys(all.own_v + from, all.step, all.size, all.dim);
  }

  // Returns a row of scores without the zeros at its end; scores of keys that the row does not see become -infinity.
  float* masked(Floats& scores, int64_t row) const {
    float* of_row = scores.data() + row * line;
    for_hidden(row, [&](int64_t from, int64_t to) { std::fill(of_row + from, of_row + std::max(from, to), kLowest); });
    return of_row;
  }
};

// Replaces a row of scores by exp(score - maximum), not yet divided by the sum. Returns the sum and the maximum.
DEEPSPEC_VECTORS void weigh_row(float* row, int64_t count, float* sum, float* most) {
  const float top = largest(row, count);
  for (int64_t i = 0; i < count; ++i) row[i] = exponential(row[i] - top);
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += row[i + lane];
  *sum = folded(lanes), *most = top;
}

// Replaces a row of scores by softmax weights, given the log-sum-exp of the forward.
DEEPSPEC_VECTORS void weigh_row_again(float* row, int64_t count, float lse) {
  for (int64_t i = 0; i < count; ++i) row[i] = exponential(std::min(0.0f, row[i] - lse));
}

// Turns gradients of the softmax weights into gradients of the scores.
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

// Writes one block's rows of the output and the log-sum-exp of its rows' scores.
DEEPSPEC_AVX2 void attend_block(const BlockAtWork& block, const Panels& k, const Panels& v, float* out, float* lse) {
  const Blocks& all = block.all;
  Space& space = block.space;
  block.copy_own(false);
  block.by_key(space.queries, space.own_k, k, space.weights);
  space.sums.resize(all.rows);
  for (int64_t row = 0; row < all.rows; ++row) {
    float most;
    weigh_row(block.masked(space.weights, row), block.line - kColumns, &space.sums[row], &most);
    lse[row] = most + std::log(space.sums[row]);
  }
  block.over_keys(space.weights, space.own_v, v, space.found);
  for (int64_t row = 0; row < all.rows; ++row) {
    float* to = out + all.row(block.group, block.number, row);
    for (int64_t i = 0; i < all.dim; ++i) to[i] = space.found[row * all.dim + i] / space.sums[row];
  }
}

// Gradients of the queries, of the blocks' own keys and values, and, accumulated, of the context's keys and values.
struct Slopes {
  float *q, *own_k, *own_v, *k, *v;
};

DEEPSPEC_AVX2 void go_back(
    const BlockAtWork& block, const Panels& k, const Panels& v, const float* out, const float* lse, const float* slope, const Slopes& to) {
  const Blocks& all = block.all;
  Space& space = block.space;
  block.copy_own(true);
  block.by_key(space.queries, space.own_k, k, space.weights);
  block.pad(slope, 1.0f, space.by_out);
  block.by_key(space.by_out, space.own_v, v, space.slopes);
  const int64_t count = block.line - kColumns;
  for (int64_t row = 0; row < all.rows; ++row) {
    float* of_row = block.masked(space.weights, row);
    weigh_row_again(of_row, count, lse[row]);
    const int64_t at = all.row(block.group, block.number, row);
    slope_scores(of_row, space.slopes.data() + row * block.line, count, inner_product(slope + at, out + at, all.dim));
  }
  // The tiles write a few rows after the block's own keys.
  space.own.resize(rounded_up(all.size, kRows) * all.dim);
  space.panels.resize(all.rows * all.dim);
  const auto over_rows = [&](const Floats& of, const Floats& right, float* to_own, float* to_context) DEEPSPEC_AVX2 {
    pack<kColumns>(right.data(), 1, all.dim, all.dim, all.rows, space.panels.data());
    block.over_rows(of, space.panels, space.own.data(), to_context + block.group * all.dim);
    for (int64_t key = 0; key < all.size; ++key)
      std::copy_n(space.own.data() + key * all.dim, all.dim, to_own + all.own_of(block.group, block.number) + key * all.step);
  };
  over_rows(space.weights, space.by_out, to.own_v, to.v);
  over_rows(space.slopes, space.queries, to.own_k, to.k);
  block.over_keys(space.slopes, space.own_k, k, space.found);
  const float scale = static_cast<float>(all.seen.scale);
  for (int64_t row = 0; row < all.rows; ++row) {
    float* to_row = to.q + all.row(block.group, block.number, row);
    for (int64_t i = 0; i < all.dim; ++i) to_row[i] = space.found[row * all.dim + i] * scale;
  }
}

// The tensors of all sequences, one sequence after the other, with the shapes of `Blocks`.
struct Batch {
  const at::Tensor &q, &k, &v, &own_k, &own_v;
  const Seen& seen;
  int64_t heads = q.size(1), groups = k.size(1), dim = q.size(2), size = q.size(0) / static_cast<int64_t>(seen.anchors.size());

  // Calls `each(blocks, count, first_block, first_token)` for each sequence in order.
  template <typename Each>
  void for_sequences(Each each) const {
    int64_t block = 0, token = 0;
    for (const SequenceBlocks& sequence : seen.sequences) {
      const auto at = [](const at::Tensor& of, int64_t row) { return of.const_data_ptr<float>() + row * of.stride(0); };
      each(Blocks{at(q, block * size), at(k, token), at(v, token), at(own_k, block * size), at(own_v, block * size),
                  seen.anchors.data() + block, seen, heads, groups, dim, size, sequence.tokens},
           sequence.blocks, block, token);
      block += sequence.blocks, token += sequence.tokens;
    }
  }
};

struct BlockByBlock : torch::autograd::Function<BlockByBlock> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& given_q, const at::Tensor& given_k, const at::Tensor& given_v,
                            const at::Tensor& given_own_k, const at::Tensor& given_own_v, const c10::intrusive_ptr<Seen>& seen) {
    RECORD_USER_SCOPE("block_attention");
    const at::Tensor q = given_q.contiguous(), k = given_k.contiguous(), v = given_v.contiguous();
    const at::Tensor own_k = given_own_k.contiguous(), own_v = given_own_v.contiguous();
    const Batch batch{q, k, v, own_k, own_v, *seen};
    const int64_t groups = batch.groups, rows = q.size(0), of_block = batch.heads / groups * batch.size;
    const at::Tensor out = at::empty({rows, batch.heads * batch.dim}, q.options());
    const at::Tensor lse = at::empty({static_cast<int64_t>(seen->anchors.size()), groups, of_block}, q.options());
    float *to = out.mutable_data_ptr<float>(), *to_lse = lse.mutable_data_ptr<float>();
    std::vector<Panels> keys(groups), values(groups);
    batch.for_sequences([&](const Blocks& all, int64_t count, int64_t first_block, int64_t) {
      for_tasks(groups, 1, [&](int64_t group) {
        keys[group].copy_keys(all.k + group * all.dim, all.step, all.tokens, all.dim);
        values[group].copy_values(all.v + group * all.dim, all.step, all.tokens, all.dim);
      });
      float* to_sequence = to + first_block * all.size * all.heads * all.dim;
      for_tasks(groups * count, 1, [&](int64_t task) {
        const int64_t group = task / count, block = task % count;
        float* of_rows = to_lse + ((first_block + block) * groups + group) * of_block;
        attend_block(BlockAtWork(all, group, block), keys[group], values[group], to_sequence, of_rows);
      });
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
    const Batch batch{q, k, v, own_k, own_v, *seen};
    const int64_t groups = batch.groups, of_block = batch.heads / groups * batch.size, tokens = k.size(0);
    const at::Tensor by_q = at::empty_like(q), by_own_k = at::empty_like(own_k), by_own_v = at::empty_like(own_v);
    // Sums over all blocks of a KV head, in order. The tiles add zeros to a few rows after a sequence: the next
    // sequence's rows or the spare rows at the end.
    const at::Tensor by_k = at::zeros({tokens + kColumns + kRows, groups, batch.dim}, q.options()), by_v = at::zeros_like(by_k);
    const float *out = saved[5].const_data_ptr<float>(), *lse = saved[6].const_data_ptr<float>(), *slopes = slope.const_data_ptr<float>();
    const Slopes to{by_q.mutable_data_ptr<float>(), by_own_k.mutable_data_ptr<float>(), by_own_v.mutable_data_ptr<float>(),
                    by_k.mutable_data_ptr<float>(), by_v.mutable_data_ptr<float>()};
    for_tasks(groups, 1, [&](int64_t group) {
      Panels keys, values;
      batch.for_sequences([&](const Blocks& all, int64_t count, int64_t first_block, int64_t first_token) {
        for (auto [of, panels] : {std::pair{all.k, &keys}, std::pair{all.v, &values}}) {
          panels->copy_keys(of + group * all.dim, all.step, all.tokens, all.dim);
          panels->copy_values(of + group * all.dim, all.step, all.tokens, all.dim);
        }
        const int64_t of_q = first_block * all.size * all.heads * all.dim, of_own = first_block * all.size * all.step;
        const Slopes here{to.q + of_q, to.own_k + of_own, to.own_v + of_own, to.k + first_token * all.step, to.v + first_token * all.step};
        for (int64_t block = 0; block < count; ++block)
          go_back(BlockAtWork(all, group, block), keys, values, out + of_q, lse + ((first_block + block) * groups + group) * of_block,
                  slopes + of_q, here);
      });
    });
    return {by_q, by_k.narrow(0, 0, tokens), by_v.narrow(0, 0, tokens), by_own_k, by_own_v, at::Tensor()};
  }
};

#endif

}  // namespace

extern "C" {

// Whether this processor computes the attention of float32 blocks on the CPU one block at a time.
bool ds_attends_by_block(int64_t dim) { return multiplies_here() && dim % kColumns == 0; }

// Attention of q [A·B, H, D] over the context and over each block's own keys. A block sees the context k and v [T, G,
// D] before its anchor, and its own keys and values in own_k and own_v [A·B, G, D]. The query at position p sees only
// keys at positions above p - `window`. The blocks and tokens of the sequences follow one another. `*out` is a new
// tensor [A·B, H·D]. It is null on other devices, for other dtypes or head sizes, and without AVX2.
char* ds_attend_by_block(const at::Tensor* q, const at::Tensor* k, const at::Tensor* v, const at::Tensor* own_k, const at::Tensor* own_v,
                         const SequenceBlocks* sequences, size_t count, const int64_t* anchors, int64_t window, double scale, at::Tensor** out) {
  return caught([&] {
    *out = nullptr;
#if DEEPSPEC_TILES
    if (!has_avx2() || q->size(-1) % kColumns != 0) return;
    for (const at::Tensor* each : {q, k, v, own_k, own_v})
      if (!each->device().is_cpu() || each->scalar_type() != at::kFloat) return;
    for (const at::Tensor* each : {q, k, v, own_k, own_v}) TORCH_CHECK(each->dim() == 3, "tensors of other shapes");
    auto seen = c10::make_intrusive<Seen>();
    seen->sequences.assign(sequences, sequences + count);
    int64_t blocks = 0, tokens = 0;
    for (const SequenceBlocks& sequence : seen->sequences) {
      TORCH_CHECK(0 <= sequence.tokens && sequence.tokens <= k->size(0) - tokens, "a context of another shape");
      TORCH_CHECK(0 <= sequence.blocks && sequence.blocks <= q->size(0) - blocks, "blocks of another number or size");
      for (int64_t block = 0; block < sequence.blocks; ++block) {
        const int64_t anchor = anchors[blocks + block];
        TORCH_CHECK(0 <= anchor && anchor <= sequence.tokens, "an anchor behind the context");
      }
      blocks += sequence.blocks, tokens += sequence.tokens;
    }
    const int64_t heads = q->size(1), groups = k->size(1), dim = q->size(2);
    TORCH_CHECK(blocks > 0 && window > 0 && q->size(0) > 0 && q->size(0) % blocks == 0, "blocks of another number or size");
    TORCH_CHECK(groups > 0 && heads % groups == 0, "query heads that do not share those of keys");
    for (const at::Tensor* each : {k, v}) TORCH_CHECK(each->sizes() == at::IntArrayRef({tokens, groups, dim}), "a context of another shape");
    for (const at::Tensor* each : {own_k, own_v})
      TORCH_CHECK(each->sizes() == at::IntArrayRef({q->size(0), groups, dim}), "keys of blocks of another shape");
    seen->anchors.assign(anchors, anchors + blocks);
    seen->window = window;
    seen->scale = scale;
    *out = new at::Tensor(BlockByBlock::apply(*q, *k, *v, *own_k, *own_v, seen));
#endif
  });
}
}
