// Kernels that gather and scatter rows for the fused attention of draft blocks (gpu_attention.cpp). The blocks of a
// sequence form tiles of equally many slots, and queries that share keys follow one another. Gradients of the same key
// are summed over the tiles.

// The blocks of a sequence, grouped into tiles. The context of a tile has two parts: the leading keys that all its
// blocks see, and `rest` keys after them that some blocks see. A slot that is left over repeats the tile's last block.
struct Tiles {
  const int* seen;     // [tiles], number of keys that all blocks of a tile see
  const int* offset;   // [tiles], their offset in the packed keys of all tiles
  const int* block;    // [tiles · slots], the block of a slot
  const int* anchor;   // [tiles · slots], the anchor of that block
  const int* place;    // [blocks], the slot of a block
  int tiles, slots, size, repeats, groups, dim, rest, tokens;

  __device__ int rows() const { return slots * size * repeats; }
  __device__ int keys() const { return rest + slots * size; }
  __device__ int line() const { return groups * dim; }
  // Whether the slot is not just padding of its tile.
  __device__ bool is_real(int slot) const { return place[block[slot]] == slot; }
};

__device__ __forceinline__ void copy_line(bf16* to, const bf16* from, int values) {
  for (int i = threadIdx.x * 8; i < values; i += blockDim.x * 8)
    *reinterpret_cast<Eight*>(to + i) = from ? *reinterpret_cast<const Eight*>(from + i) : Eight{};
}

// Copies heads [blocks · size, groups · repeats, dim] to rows [tiles · slots · size · repeats, groups, dim]. With
// `with_zeros`, padding slots get zeros. One thread block per position of a slot.
extern "C" __global__ void gather_heads(Tiles tiles, const bf16* heads, bf16* rows, int with_zeros) {
  const int slot = blockIdx.x / tiles.size, position = blockIdx.x % tiles.size;
  const bool is_zero = with_zeros && !tiles.is_real(slot);
  const bf16* from = heads + (static_cast<long long>(tiles.block[slot]) * tiles.size + position) * tiles.line() * tiles.repeats;
  bf16* to = rows + static_cast<long long>(blockIdx.x) * tiles.repeats * tiles.line();
  for (int i = threadIdx.x * 8; i < tiles.line() * tiles.repeats; i += blockDim.x * 8) {
    const int head = i / tiles.dim, group = head / tiles.repeats, repeat = head % tiles.repeats;
    const Eight values = is_zero ? Eight{} : *reinterpret_cast<const Eight*>(from + i);
    *reinterpret_cast<Eight*>(to + (repeat * tiles.groups + group) * tiles.dim + i % tiles.dim) = values;
  }
}

// The inverse of gather_heads. One thread block per position of a block.
extern "C" __global__ void scatter_heads(Tiles tiles, const bf16* rows, bf16* heads) {
  const int slot = tiles.place[blockIdx.x / tiles.size], position = blockIdx.x % tiles.size;
  const bf16* from = rows + (static_cast<long long>(slot) * tiles.size + position) * tiles.repeats * tiles.line();
  bf16* to = heads + static_cast<long long>(blockIdx.x) * tiles.line() * tiles.repeats;
  for (int i = threadIdx.x * 8; i < tiles.line() * tiles.repeats; i += blockDim.x * 8) {
    const int head = i / tiles.dim, group = head / tiles.repeats, repeat = head % tiles.repeats;
    *reinterpret_cast<Eight*>(to + i) = *reinterpret_cast<const Eight*>(from + (repeat * tiles.groups + group) * tiles.dim + i % tiles.dim);
  }
}

// Gathers keys or values of the rest of each tile's context and of its own blocks. `out` is [tiles, rest + slots ·
// size, groups, dim]. One thread block per key.
extern "C" __global__ void gather_rest(Tiles tiles, const bf16* context, const bf16* own, bf16* out) {
  const int tile = blockIdx.y, key = blockIdx.x;
  const bf16* from;
  if (key < tiles.rest) {
    const int token = tiles.seen[tile] + key;
    from = token < tiles.tokens ? context + static_cast<long long>(token) * tiles.line() : nullptr;
  } else {
    const int slot = tile * tiles.slots + (key - tiles.rest) / tiles.size, position = (key - tiles.rest) % tiles.size;
    from = own + (static_cast<long long>(tiles.block[slot]) * tiles.size + position) * tiles.line();
  }
  copy_line(out + (static_cast<long long>(tile) * tiles.keys() + key) * tiles.line(), from, tiles.line());
}

// Packs the context keys that all blocks of a tile see, one tile after the other.
extern "C" __global__ void pack_seen(Tiles tiles, const bf16* context, bf16* out) {
  const int tile = blockIdx.y, key = blockIdx.x;
  if (key >= tiles.seen[tile]) return;
  copy_line(out + (static_cast<long long>(tiles.offset[tile]) + key) * tiles.line(), context + static_cast<long long>(key) * tiles.line(), tiles.line());
}

// Writes the bias of the scores of the rest, [tiles, rows, keys]: 0 where a row sees a key, else a very low number. One
// thread block per row.
extern "C" __global__ void write_bias(Tiles tiles, bf16* out) {
  const int tile = blockIdx.y, row = blockIdx.x, mine = row / (tiles.size * tiles.repeats);
  const int anchor = tiles.anchor[tile * tiles.slots + mine], seen = tiles.seen[tile];
  bf16* to = out + (static_cast<long long>(tile) * tiles.rows() + row) * tiles.keys();
  const bf16 hidden = narrow(-1e30f);
  for (int key = threadIdx.x; key < tiles.keys(); key += blockDim.x) {
    const bool sees = key < tiles.rest ? seen + key < anchor : (key - tiles.rest) / tiles.size == mine;
    to[key] = sees ? 0 : hidden;
  }
}

// Merges the two parts of the attention into the outputs of the second part, [tiles · rows, groups, dim]. `first_log`
// [groups, tiles · rows] and `log` [tiles, groups, padded] are the log-sum-exps of the parts; both receive the merged
// ones. `first_log` is not used where a tile sees nothing of the first part. One thread block per row.
extern "C" __global__ void merge_parts(Tiles tiles, const bf16* first, float* first_log, bf16* out, float* log, int padded) {
  const int all = tiles.tiles * tiles.rows(), row = blockIdx.x;
  float* of_row = log + static_cast<long long>(row / tiles.rows()) * tiles.groups * padded + row % tiles.rows();
  const long long line = static_cast<long long>(row) * tiles.line();
  const bool is_seen = tiles.seen[row / tiles.rows()] > 0;
  for (int i = threadIdx.x * 8; i < tiles.line(); i += blockDim.x * 8) {
    const int group = i / tiles.dim;
    const float a = first_log[static_cast<long long>(group) * all + row], b = of_row[group * padded];
    const float most = is_seen ? fmaxf(a, b) : b;
    const float by_first = is_seen ? __expf(a - most) : 0.0f, by_second = __expf(b - most), share = 1.0f / (by_first + by_second);
    const Eight seen = is_seen ? *reinterpret_cast<const Eight*>(first + line + i) : Eight{};
    Eight* at = reinterpret_cast<Eight*>(out + line + i);
    Eight values = *at;
#pragma unroll
    for (int j = 0; j < 8; ++j) values.of[j] = narrow((by_first * wide(seen.of[j]) + by_second * wide(values.of[j])) * share);
    *at = values;
  }
  // Waits until all threads have read the log-sum-exps.
  __syncthreads();
  for (int group = threadIdx.x; group < tiles.groups; group += blockDim.x) {
    float* ours = first_log + static_cast<long long>(group) * all + row;
    float* theirs = of_row + group * padded;
    const float a = *ours, b = *theirs;
    const float most = is_seen ? fmaxf(a, b) : b;
    *ours = *theirs = most + logf((is_seen ? __expf(a - most) : 0.0f) + __expf(b - most));
  }
}

// Gradients of the context's keys or values: for each key the sum over the tiles, in order, of the gradients in
// `packed` and `rest`.
extern "C" __global__ void sum_slopes(Tiles tiles, const bf16* packed, const bf16* rest, bf16* out) {
  const int key = blockIdx.x;
  for (int i = threadIdx.x * 8; i < tiles.line(); i += blockDim.x * 8) {
    float sums[8] = {};
    const auto add = [&](const bf16* from) {
      const Eight values = *reinterpret_cast<const Eight*>(from + i);
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[j] += wide(values.of[j]);
    };
    for (int tile = 0; tile < tiles.tiles; ++tile) {
      const int seen = tiles.seen[tile];
      if (key < seen)
        add(packed + (static_cast<long long>(tiles.offset[tile]) + key) * tiles.line());
      else if (key < seen + tiles.rest)
        add(rest + (static_cast<long long>(tile) * tiles.keys() + key - seen) * tiles.line());
    }
    Eight sum;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum.of[j] = narrow(sums[j]);
    *reinterpret_cast<Eight*>(out + static_cast<long long>(key) * tiles.line() + i) = sum;
  }
}

// Gradients of the blocks' own keys or values. One thread block per key.
extern "C" __global__ void take_own(Tiles tiles, const bf16* rest, bf16* out) {
  const int slot = tiles.place[blockIdx.x / tiles.size], position = blockIdx.x % tiles.size;
  const long long key = static_cast<long long>(slot / tiles.slots) * tiles.keys() + tiles.rest + (slot % tiles.slots) * tiles.size + position;
  copy_line(out + static_cast<long long>(blockIdx.x) * tiles.line(), rest + key * tiles.line(), tiles.line());
}
