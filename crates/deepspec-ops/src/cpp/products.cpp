// Matmuls of float32 rows with packed weights. Weights are read in memory order and are prefetched, because a matmul of
// few rows mostly waits for its weights.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include "group.h"
#include "operators.h"
#include "tiles.h"

namespace {

#if DEEPSPEC_TILES

// Rows that a task multiplies by one panel, and inputs of the panel that the L1 cache holds meanwhile. The L2 cache
// holds these inputs of the rows.
constexpr int64_t kPass = 128, kInputs = 192;

// Outputs of a panel: panels are [input, kPanel], one after the other. With 16 registers, tiles of 4 rows and 3 vectors
// need fewer loads than tiles of 6 rows and 2 vectors.
template <typename Vector>
constexpr int kPanelVectors = sizeof(Vector) == sizeof(Sixteen) ? 2 : 3;
template <typename Vector>
constexpr int64_t kPanel = kPanelVectors<Vector> * kLength<Vector>;
template <typename Vector>
constexpr int64_t kPanelRows = kTileRows<Vector, kPanelVectors<Vector>>;

// The destination of a product: `kept` outputs of a panel, in rows that are `line` floats apart. `residual` has the
// same layout and is added, unless it is null.
struct Place {
  float* at;
  int64_t line, kept;
  const float* residual;
};

// Rows [rows, width] times panels [panels, width, kPanel].
struct Product {
  const float* x;
  const float* panels;
  int64_t width;

  template <typename Vector>
  const float* panel(int64_t number) const {
    return panels + number * width * kPanel<Vector>;
  }

  // Multiplies the rows from `first` to `end`, of one pass, by one panel. `following` is the panel that is read next,
  // or null.
  template <typename Vector>
  DEEPSPEC_TILE_INLINE void run(int64_t number, int64_t first, int64_t end, const Place& place, const float* following) const {
    const int64_t tiles = (end - first + kPanelRows<Vector> - 1) / kPanelRows<Vector>;
    for (int64_t input = 0; input < width; input += kInputs) {
      const int64_t depth = std::min(kInputs, width - input), behind = width - input - depth;
      const float* columns = panel<Vector>(number) + input * kPanel<Vector>;
      // With few tiles, the time goes into waiting for columns, so the first tile prefetches while it reads. With more
      // tiles, each prefetches a share of the next columns.
      const bool few = tiles <= 3;
      const float* next = behind > 0 ? columns + depth * kPanel<Vector> : following;
      const int64_t size = few || !next ? 0 : std::min(kInputs, behind > 0 ? behind : width) * kPanel<Vector>;
      Ahead ahead{next, next + size, size / (Ahead::kLine * tiles) + 1};
      for (int64_t row = first, count; row < end; row += count, ahead.fetch()) {
        count = rows_of_tile<Vector, kPanelVectors<Vector>>(end - row);
        const TileOf of{x + row * width + input, width, 1, columns, kPanel<Vector>, depth};
        const int64_t start = (row - first) * place.line;
        const Place to{place.at + start, place.line, place.kept, place.residual && behind == 0 ? place.residual + start : nullptr};
        few && row == first ? write<Vector, true>(count, of, to, input > 0) : write<Vector, false>(count, of, to, input > 0);
        // Tile by tile, so that loads of the residual overlap with the next tile's products.
        for (int64_t r = 0; to.residual && r < count; ++r)
          for (int64_t i = 0; i < to.kept; ++i) to.at[r * to.line + i] += to.residual[r * to.line + i];
      }
    }
  }

  // Computes one tile, through a buffer if fewer outputs are left.
  template <typename Vector, bool kAhead>
  DEEPSPEC_TILE_INLINE static void write(int64_t count, const TileOf& of, const Place& to, bool continues) {
    if (to.kept >= kPanel<Vector>) return tile_of<Vector, kPanelVectors<Vector>, kAhead>(count, of, to.at, to.line, continues);
    float whole[kPanelRows<Vector> * kPanel<Vector>] = {};
    for (int64_t r = 0; continues && r < count; ++r) std::copy_n(to.at + r * to.line, to.kept, whole + r * kPanel<Vector>);
    tile_of<Vector, kPanelVectors<Vector>, kAhead>(count, of, whole, kPanel<Vector>, continues);
    for (int64_t r = 0; r < count; ++r) std::copy_n(whole + r * kPanel<Vector>, to.kept, to.at + r * to.line);
  }
};

// A product with `up`; if `gate` has panels too, it is multiplied by silu of the product with `gate`.
struct Products {
  Product up, gate;
  float* out;             // [rows, outputs], rows `line` apart
  const float* residual;  // added, with the layout of `out`; or null
  int64_t rows, outputs, line;

  // Computes one panel for all rows of one pass; all panels of a pass come before the next pass.
  template <typename Vector>
  DEEPSPEC_TILE_INLINE void run(int64_t task) const {
    const int64_t panel = task % panel_count<Vector>(), first = task / panel_count<Vector>() * kPass;
    const int64_t end = std::min(rows, first + kPass), output = panel * kPanel<Vector>, kept = std::min(kPanel<Vector>, outputs - output);
    const int64_t start = first * line + output;
    float* to = out + start;
    const auto next_of = [&](const Product& product) {
      return panel + 1 < panel_count<Vector>() ? product.panel<Vector>(panel + 1) : nullptr;
    };
    if (!gate.panels)
      return up.run<Vector>(panel, first, end, {to, line, kept, residual ? residual + start : nullptr}, next_of(up));
    float gates[kPass * kPanel<Vector>], ups[kPass * kPanel<Vector>];
    gate.run<Vector>(panel, first, end, {gates, kPanel<Vector>, kPanel<Vector>, nullptr}, up.panel<Vector>(panel));
    up.run<Vector>(panel, first, end, {ups, kPanel<Vector>, kPanel<Vector>, nullptr}, next_of(gate));
    for (int64_t row = 0; row < end - first; ++row) {
      const float *gate_row = gates + row * kPanel<Vector>, *up_row = ups + row * kPanel<Vector>;
      if (kept == kPanel<Vector>)
        for (int64_t i = 0; i < kPanel<Vector>; ++i) to[row * line + i] = gate_row[i] * sigmoid(gate_row[i]) * up_row[i];
      else
        for (int64_t i = 0; i < kept; ++i) to[row * line + i] = gate_row[i] * sigmoid(gate_row[i]) * up_row[i];
    }
  }

  template <typename Vector>
  int64_t panel_count() const {
    return (outputs + kPanel<Vector> - 1) / kPanel<Vector>;
  }

  template <typename Vector>
  void for_all(void (*run)(const Products&, int64_t)) const {
    const int64_t work = std::max<int64_t>(1, std::min(rows, kPass) * up.width * kPanel<Vector>);
    const int64_t tasks = (rows + kPass - 1) / kPass * panel_count<Vector>();
    for_tasks(tasks, std::max<int64_t>(1, kWork / work), [&](int64_t task) { run(*this, task); });
  }
};

DEEPSPEC_AVX2 void run_avx2(const Products& products, int64_t task) { products.run<Eight>(task); }
DEEPSPEC_AVX512 void run_avx512(const Products& products, int64_t task) { products.run<Sixteen>(task); }

#endif

}  // namespace

extern "C" {

// The highest instruction level of this processor.
int32_t ds_product_level() { return tile_level(); }

// Outputs of a panel for an instruction level.
int64_t ds_panel([[maybe_unused]] int32_t level) {
#if DEEPSPEC_TILES
  return level == kAvx512 ? kPanel<Sixteen> : kPanel<Eight>;
#else
  return 1;
#endif
}

// A packed weight: its panels and its number of outputs.
struct PackedPart {
  const at::Tensor* panels;
  int64_t outputs;
};

// x [.., width], RMS-normalised by `gain` if given, times the transposes of weights [outputs, width] in panels: [..,
// outputs]. The outputs of the weights are concatenated. The processor must have the instruction level, and the panels
// must be packed for it. With `gate`, the result is multiplied by silu of the product with the gate's panels; with
// `residual`, that is added. The caller has checked all arguments.
char* ds_product(
    [[maybe_unused]] const at::Tensor* x, [[maybe_unused]] const at::Tensor* gain, [[maybe_unused]] double eps,
    [[maybe_unused]] const PackedPart* parts, [[maybe_unused]] size_t count, [[maybe_unused]] const at::Tensor* gate,
    [[maybe_unused]] const at::Tensor* residual, [[maybe_unused]] int32_t level, [[maybe_unused]] at::Tensor** result) {
  return caught([&] {
#if DEEPSPEC_TILES
    RECORD_USER_SCOPE(gate ? "packed_gated_product" : "packed_product");
    at::Tensor rows = x->contiguous();
    if (gain) rows = normed(rows, *gain, static_cast<float>(eps));
    std::vector<int64_t> size = rows.sizes().vec();
    const int64_t width = size.back();
    size.back() = 0;
    for (size_t part = 0; part < count; ++part) size.back() += parts[part].outputs;
    at::Tensor out = at::empty(size, rows.options());
    const auto product = [&](const at::Tensor* panels) {
      return Product{rows.const_data_ptr<float>(), panels ? panels->const_data_ptr<float>() : nullptr, width};
    };
    const float* added = residual ? residual->const_data_ptr<float>() : nullptr;
    float* to = out.mutable_data_ptr<float>();
    for (const PackedPart* part = parts; part < parts + count; ++part) {
      const Products products{product(part->panels), product(gate), to, added, rows.numel() / width, part->outputs, size.back()};
      level == kAvx512 ? products.for_all<Sixteen>(run_avx512) : products.for_all<Eight>(run_avx2);
      to += part->outputs;
      added = added ? added + part->outputs : nullptr;
    }
    *result = new at::Tensor(std::move(out));
#else
    TORCH_CHECK(false, "built for another processor");
#endif
  });
}
}
