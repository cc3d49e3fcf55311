// Tiles of float32 matmuls: the sums of some rows and columns stay in registers while the inputs stream by. Each sum is
// one chain of fused multiply-adds over the inputs in order, so its bits do not depend on other sums. For x86
// processors with AVX2 or AVX-512; the vector type selects the registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define DEEPSPEC_TILES 1
#else
#define DEEPSPEC_TILES 0
#endif

namespace {

// Instruction sets that tiles are compiled for.
enum Level : int32_t { kNone, kAvx2, kAvx512 };

// The highest level of this processor.
Level tile_level() {
#if DEEPSPEC_TILES
  static const Level level = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return kAvx512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? kAvx2 : kNone;
  }();
  return level;
#else
  return kNone;
#endif
}

#if DEEPSPEC_TILES

// Prefetches memory that is read soon, a piece at a time while something else is computed.
struct Ahead {
  const float *at = nullptr, *end = nullptr;
  int64_t step = 0;

  void fetch() {
    for (int64_t i = 0; i < step && at < end; ++i, at += kLine) __builtin_prefetch(at, 0, 2);
  }

  // Floats of a cache line.
  static constexpr int64_t kLine = 16;
};

// Functions that call tiles are compiled with one of these attributes.
#define DEEPSPEC_AVX2 __attribute__((target("avx2,fma")))
#define DEEPSPEC_AVX512 __attribute__((target("avx512f")))
#define DEEPSPEC_TILE_INLINE inline __attribute__((always_inline))

// Vectors of 8 and 16 floats.
typedef float Eight __attribute__((vector_size(32)));
typedef float Sixteen __attribute__((vector_size(64)));

template <typename Vector>
constexpr int64_t kLength = sizeof(Vector) / sizeof(float);

// The most rows of a tile of kVectors vectors whose sums stay in registers: AVX-512 has 32 registers, and AVX2 has 16.
template <typename Vector, int kVectors = 2>
constexpr int64_t kTileRows = sizeof(Vector) == sizeof(Sixteen) || kVectors == 1 ? 8 : 12 / kVectors;

// Rows of the next tile if `left` rows are left.
template <typename Vector, int kVectors = 2>
int64_t rows_of_tile(int64_t left) {
  constexpr int64_t kMost = kTileRows<Vector, kVectors>;
  return left > kMost && left < 2 * kMost ? (left + 1) / 2 : std::min(left, kMost);
}

// The operands of a tile: rows with strides `down` and `across`, and columns whose inputs are `line` floats apart.
struct TileOf {
  const float* rows;
  int64_t down, across;
  const float* columns;
  int64_t line, depth;
};

// kRows rows times kVectors vectors of columns. Overwrites `out`, whose rows are `out_line` floats apart, or continues
// the sums there. With kAhead it prefetches columns; the prefetched address may lie after all columns.
template <typename Vector, int kRows, int kVectors, bool kAhead>
DEEPSPEC_TILE_INLINE void tile_of(const TileOf& of, float* out, int64_t out_line, bool continues) {
  // In floats: about as far as a tile gets while memory answers.
  constexpr int64_t kDistance = 2048;
  const TileOf here = of;
  Vector sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 3
    for (int c = 0; c < kVectors; ++c) {
      sums[r][c] = Vector{};
      if (continues) std::memcpy(&sums[r][c], out + r * out_line + c * kLength<Vector>, sizeof(Vector));
    }
  // Few instructions besides the multiply-adds, as in matrices.cpp: there is a pointer to every third row.
  const float *columns_at = here.columns, *top = here.rows;
  const float *middle = kRows > 3 ? top + 3 * here.down : top, *bottom = kRows > 6 ? middle + 3 * here.down : top;
#pragma GCC unroll 4
  for (int64_t i = 0; i < here.depth; ++i) {
    Vector columns[kVectors];
#pragma GCC unroll 3
    for (int c = 0; c < kVectors; ++c) {
      const float* at = columns_at + c * kLength<Vector>;
      std::memcpy(&columns[c], at, sizeof(Vector));
      if (kAhead && c * kLength<Vector> % Ahead::kLine == 0)
        __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(at) + kDistance * sizeof(float)));
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const float value = r < 3 ? top[r * here.down] : r < 6 ? middle[(r - 3) * here.down] : bottom[(r - 6) * here.down];
#pragma GCC unroll 3
      for (int c = 0; c < kVectors; ++c) sums[r][c] += value * columns[c];
    }
    columns_at += here.line, top += here.across, middle += here.across, bottom += here.across;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 3
    for (int c = 0; c < kVectors; ++c) std::memcpy(out + r * out_line + c * kLength<Vector>, &sums[r][c], sizeof(Vector));
}

// As above, for up to kTileRows rows.
template <typename Vector, int kVectors, bool kAhead>
DEEPSPEC_TILE_INLINE void tile_of(int64_t rows, const TileOf& of, float* out, int64_t out_line, bool continues) {
  constexpr int kMost = kTileRows<Vector, kVectors>;
  switch (rows) {
    case 1: return tile_of<Vector, std::min(1, kMost), kVectors, kAhead>(of, out, out_line, continues);
    case 2: return tile_of<Vector, std::min(2, kMost), kVectors, kAhead>(of, out, out_line, continues);
    case 3: return tile_of<Vector, std::min(3, kMost), kVectors, kAhead>(of, out, out_line, continues);
    case 4: return tile_of<Vector, std::min(4, kMost), kVectors, kAhead>(of, out, out_line, continues);
    case 5: return tile_of<Vector, std::min(5, kMost), kVectors, kAhead>(of, out, out_line, continues);
    case 6: return tile_of<Vector, std::min(6, kMost), kVectors, kAhead>(of, out, out_line, continues);
    case 7: return tile_of<Vector, std::min(7, kMost), kVectors, kAhead>(of, out, out_line, continues);
    default: return tile_of<Vector, kMost, kVectors, kAhead>(of, out, out_line, continues);
  }
}

#endif

}  // namespace
