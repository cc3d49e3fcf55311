// Layers of a target for 1 to 8 rows of bfloat16 on a GPU; the kernels are in src/cuda/decode.cu.
#include "gpu.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace few {

// Must match the constants in decode.cu.
constexpr int64_t kRows = 8, kTile = 16, kUnit = 64, kPiece = 128, kPieces = 16, kPiecesOfLong = 32, kLong = 8192;

struct Chunk {
  void *keys, *values;
  int row, past, length, first_row, capacity, sees_chunk;
};

struct Chunks {
  Chunk chunk[kRows];
};

// Whether `of` is contiguous bfloat16 [rows, width] on the device of `like`, aligned to 16 bytes.
bool is_rows(const at::Tensor& of, const at::Tensor& like, int64_t width) {
  return of.device() == like.device() && of.scalar_type() == at::kBFloat16 && of.is_contiguous() && of.dim() == 2 && of.size(1) == width &&
         reinterpret_cast<uintptr_t>(of.const_data_ptr()) % 16 == 0;
}

// Whether `of` holds `size` contiguous bfloat16 values on the device of `like`, aligned to 16 bytes.
bool is_gain(const at::Tensor& of, const at::Tensor& like, int64_t size) {
  return of.device() == like.device() && of.scalar_type() == at::kBFloat16 && of.is_contiguous() && of.numel() == size &&
         reinterpret_cast<uintptr_t>(of.const_data_ptr()) % 16 == 0;
}

const void* pointer(const at::Tensor* of) { return of ? of->const_data_ptr() : nullptr; }

unsigned normed_bytes(int64_t rows, int64_t width) { return static_cast<unsigned>((rows + 1) * (width + 32) * 2); }

// Counters of the current stream, which are zero between kernels.
at::Tensor counters_on(const at::Tensor& on, int64_t count) {
  static std::mutex mutex;
  static std::map<std::pair<int, int64_t>, at::Tensor> known;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(on.device());
  const std::lock_guard<std::mutex> lock(mutex);
  at::Tensor& counters = known[{static_cast<int>(on.get_device()), stream.id()}];
  if (!counters.defined() || counters.numel() < count) counters = at::zeros({std::max<int64_t>(count, 4096)}, on.options().dtype(at::kInt));
  return counters;
}

void check_rows(const at::Tensor& x) {
  TORCH_CHECK(x.is_cuda() && x.dim() == 2 && x.size(0) >= 1 && x.size(0) <= kRows && is_rows(x, x, x.size(1)) && x.size(1) % kUnit == 0,
              "not 1 to 8 rows of bfloat16 of a multiple of 64 values: ", x.sizes());
}

}  // namespace few

extern "C" {

// Whether there are kernels for such a layer on the device of `like`. Its rows have `width` values, its MLP has `inner`
// and its heads `dim`, with `repeats` query heads per KV head.
bool ds_has_few_rows(const at::Tensor* like, int64_t width, int64_t inner, int64_t dim, int64_t repeats) {
  try {
    if (!like->is_cuda() || width % few::kUnit != 0 || inner % few::kUnit != 0 || (dim != 64 && dim != 128) || repeats > 16) return false;
    return gpu::has_kernels(*like, gpu::Text::kDecode) && few::normed_bytes(few::kRows, width) + (16 << 10) <= gpu::shared_memory(*like);
  } catch (...) {
    return false;
  }
}

// x [N, I], normalised by `gain` [I] if given, times the transposes of up to three weights [O_j, I], plus an optional
// residual [N, O]. The outputs of the weights are concatenated.
char* ds_few_rows_product(const at::Tensor* x, const at::Tensor* gain, double eps, const at::Tensor* const* weights, size_t count,
                          const at::Tensor* residual, at::Tensor** out) {
  return caught([&] {
    few::check_rows(*x);
    const int64_t rows = x->size(0), width = x->size(1);
    TORCH_CHECK(count >= 1 && count <= 3 && (!gain || few::is_gain(*gain, *x, width)), "weights or a norm do not fit rows of ", width);
    const void* matrices[3] = {};
    int heights[3] = {};
    for (size_t i = 0; i < count; ++i) {
      TORCH_CHECK(few::is_rows(*weights[i], *x, width) && weights[i]->size(0) % few::kTile == 0, "a weight does not fit rows of ", width);
      matrices[i] = weights[i]->const_data_ptr();
      heights[i] = static_cast<int>(weights[i]->size(0));
    }
    const int64_t height = int64_t{heights[0]} + heights[1] + heights[2];
    TORCH_CHECK(!residual || (few::is_rows(*residual, *x, height) && residual->size(0) == rows), "a residual does not fit ", height, " outputs");
    at::Tensor y = at::empty({rows, height}, x->options());
    const long long stride = width;
    gpu::Shape shape{{static_cast<unsigned>(height / few::kTile), 1, 1}, 256, gain ? few::normed_bytes(rows, width) : 8 * 12288, true};
    const void *from = x->const_data_ptr(), *added = few::pointer(residual);
    void* to = y.data_ptr();
    const int lines = static_cast<int>(rows), columns = static_cast<int>(width);
    if (gain)
      gpu::run(gpu::Text::kDecode, "product_normalised", shape, *x, from, stride, matrices[0], heights[0], matrices[1], heights[1], matrices[2],
               heights[2], gain->const_data_ptr(), static_cast<float>(eps), added, to, lines, columns);
    else
      gpu::run(gpu::Text::kDecode, "product_plain", shape, *x, from, stride, matrices[0], heights[0], matrices[1], heights[1], matrices[2], heights[2],
               added, to, lines, columns);
    *out = new at::Tensor(std::move(y));
  });
}

// silu(h gate^T) * (h up^T), where h is x [N, I] normalised by `gain`, and both weights are [O, I].
char* ds_few_rows_gated_product(const at::Tensor* x, const at::Tensor* gain, double eps, const at::Tensor* gate, const at::Tensor* up, at::Tensor** out) {
  return caught([&] {
    few::check_rows(*x);
    const int64_t rows = x->size(0), width = x->size(1), height = gate->size(0);
    TORCH_CHECK(few::is_gain(*gain, *x, width) && few::is_rows(*gate, *x, width) && few::is_rows(*up, *x, width) && up->size(0) == height &&
                    height % few::kTile == 0,
                "weights of a gated product do not fit rows of ", width);
    at::Tensor inner = at::empty({rows, height}, x->options());
    const bool is_small = rows <= 2;
    const int64_t tiles = is_small ? 1 : 2;
    const gpu::Shape shape{{static_cast<unsigned>((height / few::kTile + tiles - 1) / tiles), 1, 1}, static_cast<unsigned>(128 * tiles),
                           few::normed_bytes(rows, width), true};
    gpu::run(gpu::Text::kDecode, is_small ? "gated_product_1" : "gated_product_2", shape, *x, x->const_data_ptr(), static_cast<long long>(width),
             gate->const_data_ptr(),
             up->const_data_ptr(), static_cast<int>(height), gain->const_data_ptr(), static_cast<float>(eps), inner.data_ptr(), static_cast<int>(rows),
             static_cast<int>(width));
    *out = new at::Tensor(std::move(inner));
  });
}

struct FewRowsChunk {
  const at::Tensor *keys, *values;
  int64_t row, past, length, first;
};

struct FewRowsHeads {
  const at::Tensor *query_gain, *key_gain, *cosines, *sines;
  int64_t query, key_value, dim, window;
  double eps, scale;
  bool sees_chunk;
};

// Normalises and rotates the queries and keys of qkv [N, (H + 2G) D], appends keys and values to the chunks' KV caches,
// and attends: [N, H D].
char* ds_few_rows_attention(const at::Tensor* qkv, const FewRowsHeads* heads, const FewRowsChunk* chunks, size_t count, at::Tensor** out) {
  return caught([&] {
    const int64_t H = heads->query, G = heads->key_value, D = heads->dim, rows = qkv->size(0);
    few::check_rows(*qkv);
    TORCH_CHECK(G > 0 && H % G == 0 && H / G <= 16 && (D == 64 || D == 128) && qkv->size(1) == (H + 2 * G) * D, "heads do not fit ", qkv->sizes());
    for (const at::Tensor* gain : {heads->query_gain, heads->key_gain})
      TORCH_CHECK(!gain || few::is_gain(*gain, *qkv, D), "a norm does not fit heads of ", D);
    for (const at::Tensor* angles : {heads->cosines, heads->sines})
      TORCH_CHECK(few::is_gain(*angles, *qkv, rows * D / 2), "rotations do not fit ", rows, " rows");
    TORCH_CHECK(count >= 1 && count <= static_cast<size_t>(few::kRows), "not 1 to 8 chunks");
    few::Chunks all{};
    int64_t pieces = 1, longest = 1, covered = 0;
    for (size_t i = 0; i < count; ++i) {
      const FewRowsChunk& chunk = chunks[i];
      const at::Tensor &keys = *chunk.keys, &values = *chunk.values;
      const auto is_pool = [&](const at::Tensor& pool) {
        return pool.device() == qkv->device() && pool.scalar_type() == at::kBFloat16 && pool.is_contiguous() && pool.dim() == 4 && pool.size(2) == G &&
               pool.size(3) == D;
      };
      TORCH_CHECK(is_pool(keys) && is_pool(values) && keys.sizes() == values.sizes() && chunk.row >= 0 && chunk.row < keys.size(0) && chunk.length >= 1 &&
                      chunk.past >= 0 && chunk.past + chunk.length <= keys.size(1) && chunk.first >= 0 && chunk.first + chunk.length <= rows,
                  "a chunk does not fit its history");
      const auto as = [](int64_t value) { return static_cast<int>(value); };
      all.chunk[i] = {keys.data_ptr(),  values.data_ptr(), as(chunk.row),     as(chunk.past),
                      as(chunk.length), as(chunk.first),   as(keys.size(1)), heads->sees_chunk};
      const int64_t span = chunk.past + few::kRows, most = span > few::kLong ? few::kPiecesOfLong : few::kPieces;
      const int64_t piece = few::kPiece * ((span + most * few::kPiece - 1) / (most * few::kPiece));
      pieces = std::max(pieces, (span + piece - 1) / piece);
      longest = std::max(longest, chunk.length);
      covered += chunk.length;
    }
    TORCH_CHECK(covered == rows, "chunks of ", covered, " rows, of ", rows);
    const int64_t tiles = (longest * (H / G) + 15) / 16;
    at::Tensor y = at::empty({rows, H * D}, qkv->options());
    at::Tensor space = at::empty({pieces * G * tiles * static_cast<int64_t>(count) * 16 * (D + 2)}, qkv->options().dtype(at::kFloat));
    const at::Tensor counters = few::counters_on(*qkv, G * tiles * static_cast<int64_t>(count));
    const gpu::Shape shape{{static_cast<unsigned>(pieces), static_cast<unsigned>(G * tiles), static_cast<unsigned>(count)}, 128,
                           static_cast<unsigned>(512 * (D + 8)), true};
    gpu::run(gpu::Text::kDecode, D == 128 ? "attend_128" : "attend_64", shape, *qkv, qkv->const_data_ptr(), few::pointer(heads->query_gain),
             few::pointer(heads->key_gain), heads->cosines->const_data_ptr(), heads->sines->const_data_ptr(), y.data_ptr(), space.data_ptr(),
             counters.data_ptr(), static_cast<int>(H), static_cast<int>(G), static_cast<float>(heads->eps), static_cast<float>(heads->scale),
             static_cast<int>(heads->window), all);
    *out = new at::Tensor(std::move(y));
  });
}
}
