// Kernels for decoding a few rows (1 to 8) of a Qwen3- or Llama-like transformer in bfloat16, for sm_80 and later. From
// sm_90 on they may be launched before the previous kernel has finished; they wait for it before they read its results.
//
// Every sum runs in a fixed order that depends only on the shapes, so results repeat bit for bit. A row's result
// depends neither on other sequences nor on later rows. Its attention depends on where its chunk begins, because that
// decides how the keys are split among blocks. All matrices are row-major, and every pointer is 16-byte aligned.

namespace {

constexpr int most_rows = 8;       // columns of one tensor core tile: the most rows of a call
constexpr int tile_rows = 16;      // weight rows of one tensor core tile
constexpr int product_warps = 8;   // most warps of a product block
constexpr int unit_columns = 64;   // columns a warp takes at a time: one 128-byte line of each weight row
constexpr int depth = 3;           // units a warp keeps in flight in registers
constexpr int ring_depth = 4;      // units a warp keeps in flight in shared memory
constexpr int ring_pieces = 6;     // 16-byte pieces of a lane and unit in the ring: four of weights, two of a token
constexpr int padded_tile = 20;    // floats between tokens in the sums, so that a warp's stores hit distinct banks
constexpr int line_padding = 4;    // 16-byte words after a staged row, so that neighbouring tokens hit distinct banks

__device__ __forceinline__ unsigned narrow_pair(float low, float high) {
    unsigned result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

__device__ __forceinline__ float low_half(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// Weights are read only once, so they bypass the L1 cache.
__device__ __forceinline__ uint4 load_weights(const uint4* source) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(source));
    return value;
}

// Loads a result of the previous kernel: not through the read-only cache, and not before `wait_for_previous`.
__device__ __forceinline__ bf16 load_fresh(const bf16* source) {
    bf16 value;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(value) : "l"(source) : "memory");
    return value;
}

__device__ __forceinline__ uint4 load_fresh(const uint4* source) {
    uint4 value;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(source)
                 : "memory");
    return value;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void copy_async(void* target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)), "l"(source) : "memory");
}

// Blocks of one SM read the same tokens, so these copies go through its L1 cache. Absent tokens become zeros.
__device__ __forceinline__ void copy_token_async(void* target, const void* source, bool present = true) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source),
                 "r"(present ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_weights_async(void* target, const void* source) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(target)), "l"(source) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int pending> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ void multiply(
    float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A lane holds 8 neighbouring columns of two weight rows and of one token. The tensor core sums over columns, so their
// order is free as long as both sides agree. The first four columns form one step, the last four the next.
__device__ __forceinline__ void multiply_columns(float (&sums)[4], const uint4& low, const uint4& high, const uint4& token) {
    multiply(sums, low.x, high.x, low.y, high.y, token.x, token.y);
    multiply(sums, low.z, high.z, low.w, high.w, token.z, token.w);
}

// Lets the blocks of the stream's next kernel begin; its weights do not depend on this kernel.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for all previous kernels. A thread reads none of their results and writes nothing before this.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Prefetches the beginnings of weight rows into the L2 cache, one row per thread, before the previous kernel is done.
__device__ __forceinline__ void prefetch_rows(const bf16* weight, int width) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x < tile_rows) {
        const int columns = min(width, 4096);
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(weight + static_cast<long long>(threadIdx.x) * width),
                     "r"(columns * 2)
                     : "memory");
    }
#endif
}

__device__ __forceinline__ float sum_over_warp(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

__device__ __forceinline__ float max_over_warp(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
}

__device__ __forceinline__ float sum_of_squares(const uint4& piece, float sum) {
    const unsigned words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int index = 0; index < 4; ++index) {
        const float low = low_half(words[index]);
        const float high = high_half(words[index]);
        sum = fmaf(low, low, sum);
        sum = fmaf(high, high, sum);
    }
    return sum;
}

__device__ __forceinline__ unsigned scale_pair(unsigned value, float factor, unsigned gain) {
    return narrow_pair(low_half(value) * factor * low_half(gain), high_half(value) * factor * high_half(gain));
}

__device__ __forceinline__ uint4 scale_piece(const uint4& value, float factor, const uint4& gain) {
    return make_uint4(scale_pair(value.x, factor, gain.x), scale_pair(value.y, factor, gain.y),
                      scale_pair(value.z, factor, gain.z), scale_pair(value.w, factor, gain.w));
}

// Stages the normalised rows in shared memory. A team of 128 threads sums each row, whatever the block size, so the sum
// is the same in all kernels. The gain is staged after the last row.
__device__ __forceinline__ void stage_normalised(
    uint4* staged, const bf16* x, long long x_stride, const bf16* gain, float epsilon, int rows, int width) {
    constexpr int team = 128, team_warps = team / 32;
    __shared__ float squares[most_rows][team_warps];
    const int thread = threadIdx.x, threads = blockDim.x;
    const int pieces = width / 8, line = pieces + line_padding;
    uint4* staged_gain = staged + rows * line;
    for (int piece = thread; piece < pieces; piece += threads) {
        for (int token = 0; token < rows; ++token) {
            copy_token_async(staged + token * line + piece, x + token * x_stride + piece * 8);
        }
        copy_token_async(staged_gain + piece, gain + piece * 8);
    }
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    for (int token = thread / team; token < rows; token += threads / team) {
        float sum = 0.0f;
        for (int piece = thread % team; piece < pieces; piece += team) sum = sum_of_squares(staged[token * line + piece], sum);
        sum = sum_over_warp(sum);
        if (thread % 32 == 0) squares[token][thread % team / 32] = sum;
    }
    __syncthreads();
    for (int token = 0; token < rows; ++token) {
        float sum = 0.0f;
        for (int index = 0; index < team_warps; ++index) sum += squares[token][index];
        const float factor = rsqrtf(sum / width + epsilon);
        for (int piece = thread; piece < pieces; piece += threads) {
            staged[token * line + piece] = scale_piece(staged[token * line + piece], factor, staged_gain[piece]);
        }
    }
    __syncthreads();
}

// The sums of one tile as the tensor core leaves them: rows g and g + 8, tokens 2t and 2t + 1.
__device__ __forceinline__ void store_tile(float (&tile)[most_rows][padded_tile], const float (&sums)[4], int group, int member) {
    tile[2 * member][group] = sums[0];
    tile[2 * member + 1][group] = sums[1];
    tile[2 * member][group + 8] = sums[2];
    tile[2 * member + 1][group + 8] = sums[3];
}

// Whether this block is the last of `expected` blocks to arrive; the last one resets the counter to zero.
__device__ __forceinline__ bool arrives_last(unsigned* counter, unsigned expected) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1u) == expected - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

template <bool normalised>
__device__ __forceinline__ void product(
    const bf16* x, long long x_stride, const bf16* weight1, int height1, const bf16* weight2, int height2,
    const bf16* weight3, int height3, const bf16* gain, float epsilon, const bf16* residual, bf16* y, int rows,
    int width) {
    let_next_begin();
    extern __shared__ uint4 staged[];
    __shared__ float fixed[normalised ? product_warps : 1][most_rows][padded_tile];
    float (*partial)[most_rows][padded_tile] = normalised ? fixed : reinterpret_cast<float (*)[most_rows][padded_tile]>(staged);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, warps = blockDim.x / 32;
    const int group = lane / 4, member = lane % 4;
    const int height = height1 + height2 + height3;
    const int pieces = width / 8, line = pieces + line_padding;

    const int first_row = blockIdx.x * tile_rows;
    const bf16* weight = weight1 + static_cast<long long>(first_row) * width;
    if (first_row >= height1 + height2) {
        weight = weight3 + static_cast<long long>(first_row - height1 - height2) * width;
    } else if (first_row >= height1) {
        weight = weight2 + static_cast<long long>(first_row - height1) * width;
    }
    const uint4* low = reinterpret_cast<const uint4*>(weight) + static_cast<long long>(group) * pieces + member;
    const uint4* high = low + 8ll * pieces;
    const bool present = group < rows;

    const int first = warp, end = width / unit_columns;

    float even[4] = {0.0f, 0.0f, 0.0f, 0.0f}, odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if constexpr (normalised) {
        uint4 weights[depth][4];
        const auto load = [&](int slot, int unit) {
            weights[slot][0] = load_weights(low + unit * 8);
            weights[slot][1] = load_weights(high + unit * 8);
            weights[slot][2] = load_weights(low + unit * 8 + 4);
            weights[slot][3] = load_weights(high + unit * 8 + 4);
        };
        const auto consume = [&](int slot, int unit) {
            const uint4* source = staged + group * line + unit * 8 + member;
            multiply_columns(even, weights[slot][0], weights[slot][1], present ? source[0] : make_uint4(0, 0, 0, 0));
            multiply_columns(odd, weights[slot][2], weights[slot][3], present ? source[4] : make_uint4(0, 0, 0, 0));
        };
        // The first weights are being loaded while the block waits for its rows and normalises them.
#pragma unroll
        for (int slot = 0; slot < depth; ++slot) {
            if (first + slot * warps < end) load(slot, first + slot * warps);
        }
        wait_for_previous();
        stage_normalised(staged, x, x_stride, gain, epsilon, rows, width);
        // Without branches between them, the compiler issues the loads of all slots together.
        int base = first;
        for (; base + (2 * depth - 1) * warps < end; base += depth * warps) {
#pragma unroll
            for (int slot = 0; slot < depth; ++slot) {
                consume(slot, base + slot * warps);
                load(slot, base + (slot + depth) * warps);
            }
        }
        for (; base < end; base += depth * warps) {
#pragma unroll
            for (int slot = 0; slot < depth; ++slot) {
                const int unit = base + slot * warps;
                if (unit < end) consume(slot, unit);
                if (unit + depth * warps < end) load(slot, unit + depth * warps);
            }
        }
    } else {
        prefetch_rows(weight, width);
        wait_for_previous();
        // Each lane reads back only what it copies itself, so its ring needs no barrier and has no bank conflicts.
        const uint4* token = reinterpret_cast<const uint4*>(x + (present ? group * x_stride : 0)) + member;
        uint4* ring = staged + warp * (ring_depth * ring_pieces * 32) + lane;
        const auto load = [&](int slot, int unit) {
            uint4* target = ring + slot * (ring_pieces * 32);
            copy_weights_async(target, low + unit * 8);
            copy_weights_async(target + 32, high + unit * 8);
            copy_weights_async(target + 64, low + unit * 8 + 4);
            copy_weights_async(target + 96, high + unit * 8 + 4);
            copy_token_async(target + 128, token + unit * 8, present);
            copy_token_async(target + 160, token + unit * 8 + 4, present);
        };
#pragma unroll
        for (int slot = 0; slot < ring_depth; ++slot) {
            if (first + slot * warps < end) load(slot, first + slot * warps);
            commit_copies();
        }
        int slot = 0;
        for (int unit = first; unit < end; unit += warps) {
            wait_for_copies<ring_depth - 1>();
            const uint4* source = ring + slot * (ring_pieces * 32);
            multiply_columns(even, source[0], source[32], source[128]);
            multiply_columns(odd, source[64], source[96], source[160]);
            if (unit + ring_depth * warps < end) load(slot, unit + ring_depth * warps);
            commit_copies();
            slot = slot + 1 == ring_depth ? 0 : slot + 1;
        }
        // The sums reuse the memory of the rings.
        wait_for_copies<0>();
        __syncthreads();
    }
#pragma unroll
    for (int index = 0; index < 4; ++index) even[index] += odd[index];
    store_tile(partial[warp], even, group, member);
    __syncthreads();

    for (int cell = thread; cell < rows * tile_rows; cell += blockDim.x) {
        float sum = 0.0f;
        for (int index = 0; index < warps; ++index) sum += partial[index][cell / tile_rows][cell % tile_rows];
        const long long place = static_cast<long long>(cell / tile_rows) * height + first_row + cell % tile_rows;
        if (residual) sum += wide(residual[place]);
        y[place] = narrow(sum);
    }
}

constexpr int warps_per_tile = 4;              // warps that share the columns of one tile of a gated product

constexpr int attend_warps = 4;
constexpr int attend_threads = 32 * attend_warps;
constexpr int query_tile = 16;                 // query vectors of one block
constexpr int key_tile = 64;                   // keys per step of a block
constexpr int own_keys = 8;                    // most rows of a chunk
constexpr int most_pieces = 32;                // most blocks that share one KV cache
constexpr int score_line = key_tile + 4;       // floats between the scores of two queries
constexpr int probability_line = key_tile + 8; // values between the probabilities of two queries

// The number of keys per block depends only on the KV cache, so a row's sums do not change with the chunk's length.
__device__ __forceinline__ int piece_keys(int past) {
    const int span = past + own_keys, step = span > 8192 ? 4096 : 2048;
    return 128 * ((span + step - 1) / step);
}

__device__ __forceinline__ float power_of_two(float exponent) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
}

__device__ __forceinline__ unsigned load_pair(const bf16* source) { return *reinterpret_cast<const unsigned*>(source); }

struct Chunk {
    bf16* keys;
    bf16* values;
    int row, past, length, first_row, capacity, sees_chunk;
};

struct Chunks {
    Chunk chunk[8];
};

// One head of one row, spread over a warp: lane l holds the pairs l and l + 32 of the two halves.
template <int size> struct Head {
    static constexpr int pairs = size / 64;
    float low[pairs], high[pairs], cosine[pairs], sine[pairs];

    __device__ __forceinline__ void load(const bf16* source, const bf16* cosines, const bf16* sines, int lane) {
#pragma unroll
        for (int index = 0; index < pairs; ++index) {
            const int place = lane + 32 * index;
            low[index] = wide(load_fresh(source + place));
            high[index] = wide(load_fresh(source + place + size / 2));
            cosine[index] = wide(load_fresh(cosines + place));
            sine[index] = wide(load_fresh(sines + place));
        }
    }

    // Normalises when there is a gain, then rotates.
    __device__ __forceinline__ void finish(const bf16* gain, float epsilon, int lane) {
        if (gain) {
            float sum = 0.0f;
#pragma unroll
            for (int index = 0; index < pairs; ++index) sum += low[index] * low[index] + high[index] * high[index];
            const float factor = rsqrtf(sum_over_warp(sum) / size + epsilon);
#pragma unroll
            for (int index = 0; index < pairs; ++index) {
                const int place = lane + 32 * index;
                low[index] = wide(narrow(low[index] * factor * wide(__ldg(gain + place))));
                high[index] = wide(narrow(high[index] * factor * wide(__ldg(gain + place + size / 2))));
            }
        }
#pragma unroll
        for (int index = 0; index < pairs; ++index) {
            const float first = low[index] * cosine[index] - high[index] * sine[index];
            const float second = high[index] * cosine[index] + low[index] * sine[index];
            low[index] = first;
            high[index] = second;
        }
    }

    __device__ __forceinline__ void store(bf16* target, int lane) const {
#pragma unroll
        for (int index = 0; index < pairs; ++index) {
            target[lane + 32 * index] = narrow(low[index]);
            target[lane + 32 * index + size / 2] = narrow(high[index]);
        }
    }
};

template <int size>
__device__ __forceinline__ void attend(
    const bf16* qkv, const bf16* query_gain, const bf16* key_gain, const bf16* cosines, const bf16* sines,
    bf16* output, float* workspace, unsigned* counters, int query_heads, int key_heads, float epsilon, float scale,
    int window, const Chunks& chunks) {
    let_next_begin();
    constexpr int line = size + 8;                    // values between staged rows, so that fragments hit distinct banks
    constexpr int stage = 2 * key_tile * line;        // values of one stage: keys, then values
    constexpr int column_tiles = size / 8 / attend_warps;
    constexpr int rows_per_warp = query_tile / attend_warps;
    extern __shared__ uint4 dynamic_shared[];
    __shared__ __align__(16) bf16 queries[query_tile * line];
    __shared__ __align__(16) float scores[query_tile * score_line];
    __shared__ __align__(16) bf16 probabilities[query_tile * probability_line];
    __shared__ float rescale[query_tile], maxima[query_tile], totals[query_tile];
    bf16* stages = reinterpret_cast<bf16*>(dynamic_shared);

    const Chunk& chunk = chunks.chunk[blockIdx.z];
    const int past = chunk.past, length = chunk.length, limit = past + length;
    const int ratio = query_heads / key_heads;
    const int query_tiles = gridDim.y / key_heads;
    const int head = blockIdx.y / query_tiles, tile = blockIdx.y % query_tiles;
    const int piece = blockIdx.x, span = piece_keys(past), pieces = (past + own_keys + span - 1) / span;
    const int first_query = tile * query_tile, valid = min(query_tile, length * ratio - first_query);
    if (piece >= pieces || valid <= 0) return;

    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, group = lane / 4, member = lane % 4;
    const long long row_width = static_cast<long long>(query_heads + 2 * key_heads) * size;
    const bf16* own = qkv + chunk.first_row * row_width;
    const bf16* own_cosines = cosines + chunk.first_row * (size / 2);
    const bf16* own_sines = sines + chunk.first_row * (size / 2);
    const long long key_stride = static_cast<long long>(key_heads) * size;
    const long long pool_offset = static_cast<long long>(chunk.row) * chunk.capacity * key_stride + head * size;

    // Keys before this block's first key, or before every window of its queries, are not read.
    int start = piece * span;
    const int end = min(limit, start + span);
    if (window > 0) start = max(start, (max(0, past + first_query / ratio - window + 1)) / key_tile * key_tile);
    const int steps = start < end ? (end - start + key_tile - 1) / key_tile : 0;

    // Cached keys come from the pool. The chunk's own keys and values come from its rows of qkv, because no block may
    // read what another block of this call writes. Absent keys are zeros, so that their zero probabilities meet no
    // stray NaN.
    const auto load_history = [&](int step) {
        const int first_key = start + step * key_tile;
        bf16* keys = stages + (step % 2) * stage;
        bf16* values = keys + key_tile * line;
        for (int index = thread; index < key_tile * size / 8; index += attend_threads) {
            const int slot = index / (size / 8), column = index % (size / 8) * 8, key = first_key + slot;
            if (key < past) {
                const long long place = pool_offset + key * key_stride + column;
                copy_async(keys + slot * line + column, chunk.keys + place);
                copy_async(values + slot * line + column, chunk.values + place);
            } else if (key >= limit) {
                *reinterpret_cast<uint4*>(keys + slot * line + column) = make_uint4(0, 0, 0, 0);
                *reinterpret_cast<uint4*>(values + slot * line + column) = make_uint4(0, 0, 0, 0);
            }
        }
        commit_copies();
    };
    const auto make_own = [&](int step) {
        const int first_key = start + step * key_tile;
        bf16* keys = stages + (step % 2) * stage;
        bf16* values = keys + key_tile * line;
        for (int row = warp; row < length; row += attend_warps) {
            const int key = past + row, slot = key - first_key;
            if (slot < 0 || slot >= key_tile) continue;
            const bf16* source = own + row * row_width + (query_heads + head) * size;
            Head<size> made;
            made.load(source, own_cosines + row * (size / 2), own_sines + row * (size / 2), lane);
            uint4 value = make_uint4(0, 0, 0, 0);
            const bool carries = lane < size / 8;
            if (carries) value = load_fresh(reinterpret_cast<const uint4*>(source + key_stride) + lane);
            made.finish(key_gain, epsilon, lane);
            made.store(keys + slot * line, lane);
            if (carries) reinterpret_cast<uint4*>(values + slot * line)[lane] = value;
            if (tile == 0 && key < chunk.capacity) {
                const long long place = pool_offset + key * key_stride;
                made.store(chunk.keys + place, lane);
                if (carries) reinterpret_cast<uint4*>(chunk.values + place)[lane] = value;
            }
        }
    };
    // Cached keys and values are being loaded while the block waits for its rows. Every other writer of the pools is an
    // ordinary kernel in front of the layers, and products wait for it completely.
    if (steps > 0) load_history(0);
    if (steps > 1) {
        load_history(1);
    } else {
        commit_copies();
    }
    wait_for_previous();
    Head<size> mine[rows_per_warp];
#pragma unroll
    for (int index = 0; index < rows_per_warp; ++index) {
        const int local = attend_warps * index + warp;
        if (local < valid) {
            const int row = (first_query + local) / ratio, query_head = head * ratio + (first_query + local) % ratio;
            mine[index].load(own + row * row_width + query_head * size, own_cosines + row * (size / 2),
                             own_sines + row * (size / 2), lane);
        }
    }

    if (steps > 0) make_own(0);
    if (steps > 1) make_own(1);

#pragma unroll
    for (int index = 0; index < rows_per_warp; ++index) {
        const int local = attend_warps * index + warp;
        if (local < valid) {
            mine[index].finish(query_gain, epsilon, lane);
            mine[index].store(queries + local * line, lane);
        } else {
            for (int column = lane; column < size; column += 32) queries[local * line + column] = 0;
        }
    }

    const float infinity = __int_as_float(0x7f800000);
    const float exponent_scale = scale * 1.4426950408889634f;
    float highest[rows_per_warp], total[rows_per_warp], sums[column_tiles][4];
#pragma unroll
    for (int index = 0; index < rows_per_warp; ++index) {
        highest[index] = -infinity;
        total[index] = 0.0f;
    }
#pragma unroll
    for (int index = 0; index < column_tiles; ++index) {
#pragma unroll
        for (int cell = 0; cell < 4; ++cell) sums[index][cell] = 0.0f;
    }

    for (int step = 0; step < steps; ++step) {
        const int first_key = start + step * key_tile;
        const bf16* keys = stages + (step % 2) * stage;
        const bf16* values = keys + key_tile * line;
        wait_for_copies<1>();
        __syncthreads();

        // Scores: each warp takes 16 keys.
        float dots[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
        for (int column = 0; column < size; column += 16) {
            const bf16* query = queries + group * line + column + 2 * member;
            const unsigned a0 = load_pair(query), a1 = load_pair(query + 8 * line);
            const unsigned a2 = load_pair(query + 8), a3 = load_pair(query + 8 * line + 8);
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const bf16* key = keys + (warp * 16 + part * 8 + group) * line + column + 2 * member;
                multiply(dots[part], a0, a1, a2, a3, load_pair(key), load_pair(key + 8));
            }
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            float* target = scores + group * score_line + warp * 16 + part * 8 + 2 * member;
            *reinterpret_cast<float2*>(target) = make_float2(dots[part][0], dots[part][1]);
            *reinterpret_cast<float2*>(target + 8 * score_line) = make_float2(dots[part][2], dots[part][3]);
        }
        __syncthreads();

        // Probabilities, relative to the highest score so far: each warp takes four queries, each lane two keys.
#pragma unroll
        for (int index = 0; index < rows_per_warp; ++index) {
            const int local = attend_warps * index + warp;
            const int position = past + (first_query + local) / ratio, key = first_key + 2 * lane;
            const float2 pair = *reinterpret_cast<const float2*>(scores + local * score_line + 2 * lane);
            const auto sees = [&](int candidate) {
                const bool order = candidate <= position || (chunk.sees_chunk && candidate >= past);
                return candidate < limit && order && (window <= 0 || candidate > position - window);
            };
            const float left = sees(key) ? pair.x * exponent_scale : -infinity;
            const float right = sees(key + 1) ? pair.y * exponent_scale : -infinity;
            const float before = highest[index], now = fmaxf(before, max_over_warp(fmaxf(left, right)));
            const bool any = now > -infinity;
            const unsigned both = any ? narrow_pair(power_of_two(left - now), power_of_two(right - now)) : 0u;
            const float factor = any ? power_of_two(before - now) : 1.0f;
            *reinterpret_cast<unsigned*>(probabilities + local * probability_line + 2 * lane) = both;
            total[index] = total[index] * factor + sum_over_warp(low_half(both) + high_half(both));
            highest[index] = now;
            if (lane == 0) rescale[local] = factor;
        }
        __syncthreads();

        // Values: each warp computes a quarter of the columns, over all keys of the tile.
        const float upper = rescale[group], lower = rescale[group + 8];
#pragma unroll
        for (int index = 0; index < column_tiles; ++index) {
            sums[index][0] *= upper;
            sums[index][1] *= upper;
            sums[index][2] *= lower;
            sums[index][3] *= lower;
        }
#pragma unroll
        for (int key = 0; key < key_tile; key += 16) {
            const bf16* probability = probabilities + group * probability_line + key + 2 * member;
            const unsigned a0 = load_pair(probability), a1 = load_pair(probability + 8 * probability_line);
            const unsigned a2 = load_pair(probability + 8), a3 = load_pair(probability + 8 * probability_line + 8);
#pragma unroll
            for (int index = 0; index < column_tiles; index += 2) {
                const int column = (warp * column_tiles + index) * 8 + lane / 16 * 8;
                unsigned b0, b1, b2, b3;
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(b0), "=r"(b1), "=r"(b2), "=r"(b3)
                             : "r"(shared_address(values + (key + lane % 16) * line + column))
                             : "memory");
                multiply(sums[index], a0, a1, a2, a3, b0, b1);
                multiply(sums[index + 1], a0, a1, a2, a3, b2, b3);
            }
        }
        __syncthreads();
        if (step + 2 < steps) {
            load_history(step + 2);
            make_own(step + 2);
        } else {
            commit_copies();
        }
    }

#pragma unroll
    for (int index = 0; index < rows_per_warp; ++index) {
        if (lane == 0) {
            maxima[attend_warps * index + warp] = highest[index];
            totals[attend_warps * index + warp] = total[index];
        }
    }
    __syncthreads();

    const auto result = [&](int local, int column) {
        const int row = (first_query + local) / ratio, query_head = head * ratio + (first_query + local) % ratio;
        return output + (static_cast<long long>(chunk.first_row + row) * query_heads + query_head) * size + column;
    };
    const long long place = (static_cast<long long>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x;
    constexpr int partial_size = query_tile * (size + 2);
    float* partials = workspace + place * partial_size;
    float* partial = partials + static_cast<long long>(piece) * partial_size;
#pragma unroll
    for (int index = 0; index < column_tiles; ++index) {
        const int column = (warp * column_tiles + index) * 8 + 2 * member;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int local = group + 8 * half;
            if (local >= valid) continue;
            const float left = sums[index][2 * half], right = sums[index][2 * half + 1];
            if (pieces == 1) {
                const float whole = totals[local];
                *reinterpret_cast<unsigned*>(result(local, column)) = narrow_pair(left / whole, right / whole);
            } else {
                *reinterpret_cast<float2*>(partial + local * size + column) = make_float2(left, right);
            }
        }
    }
    if (pieces == 1) return;
    if (thread < valid) {
        partial[query_tile * size + thread] = maxima[thread];
        partial[query_tile * size + query_tile + thread] = totals[thread];
    }
    if (!arrives_last(counters + place / gridDim.x, pieces)) return;

    // The last block weights the pieces in order; `scores` then holds the maxima and after that the weights.
    for (int index = thread; index < valid * pieces; index += attend_threads) {
        const int local = index / pieces, other = index % pieces;
        const float* source = partials + static_cast<long long>(other) * partial_size + query_tile * size + local;
        scores[local * score_line + other] = __ldcg(source);
        scores[local * score_line + most_pieces + other] = __ldcg(source + query_tile);
    }
    __syncthreads();
    if (thread < valid) {
        float* weights = scores + thread * score_line;
        float top = -infinity, whole = 0.0f;
        for (int other = 0; other < pieces; ++other) top = fmaxf(top, weights[other]);
        for (int other = 0; other < pieces; ++other) {
            weights[other] = power_of_two(weights[other] - top);
            whole += weights[other] * weights[most_pieces + other];
        }
        totals[thread] = whole;
    }
    __syncthreads();
    for (int index = thread; index < valid * (size / 4); index += attend_threads) {
        const int local = index / (size / 4), column = index % (size / 4) * 4;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (int other = 0; other < pieces; ++other) {
            const float* source = partials + static_cast<long long>(other) * partial_size + local * size + column;
            const float4 part = __ldcg(reinterpret_cast<const float4*>(source));
            const float weight = scores[local * score_line + other];
            sum.x = fmaf(weight, part.x, sum.x);
            sum.y = fmaf(weight, part.y, sum.y);
            sum.z = fmaf(weight, part.z, sum.z);
            sum.w = fmaf(weight, part.w, sum.w);
        }
        const float whole = totals[local];
        *reinterpret_cast<uint2*>(result(local, column)) =
            make_uint2(narrow_pair(sum.x / whole, sum.y / whole), narrow_pair(sum.z / whole, sum.w / whole));
    }
}

// A block has `tiles` tiles of both matrices; four warps share each tile.
template <int tiles>
__device__ __forceinline__ void gated(
    const bf16* x, long long x_stride, const bf16* gate, const bf16* up, int height, const bf16* gain,
    float epsilon, bf16* inner, int rows, int width) {
    let_next_begin();
    extern __shared__ uint4 staged[];
    __shared__ float partial[tiles * warps_per_tile][2][most_rows][padded_tile];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, group = lane / 4, member = lane % 4;
    const int part = warp % warps_per_tile;
    const int first_row = (blockIdx.x * tiles + warp / warps_per_tile) * tile_rows;
    const int pieces = width / 8, line = pieces + line_padding, units = width / unit_columns;
    const long long offset = static_cast<long long>(first_row + group) * pieces + member;
    const uint4* gate_low = reinterpret_cast<const uint4*>(gate) + offset;
    const uint4* up_low = reinterpret_cast<const uint4*>(up) + offset;
    const long long down = 8ll * pieces;
    const bool present = group < rows;

    // A warp processes the two halves of a unit one after the other, both matrices at a time.
    const int count = first_row < height && part < units ? 2 * ((units - part - 1) / warps_per_tile + 1) : 0;
    const auto place = [&](int step) { return (part + warps_per_tile * (step / 2)) * 8 + step % 2 * 4; };
    uint4 weights[depth][4];
    const auto load = [&](int slot, int step) {
        const int column = place(step);
        weights[slot][0] = load_weights(gate_low + column);
        weights[slot][1] = load_weights(gate_low + down + column);
        weights[slot][2] = load_weights(up_low + column);
        weights[slot][3] = load_weights(up_low + down + column);
    };
#pragma unroll
    for (int slot = 0; slot < depth; ++slot) {
        if (slot < count) load(slot, slot);
    }
    wait_for_previous();
    stage_normalised(staged, x, x_stride, gain, epsilon, rows, width);

    float gate_sums[4] = {0.0f, 0.0f, 0.0f, 0.0f}, up_sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const auto consume = [&](int slot, int step) {
        const uint4 token = present ? staged[group * line + place(step) + member] : make_uint4(0, 0, 0, 0);
        multiply_columns(gate_sums, weights[slot][0], weights[slot][1], token);
        multiply_columns(up_sums, weights[slot][2], weights[slot][3], token);
    };
    int base = 0;
    for (; base + 2 * depth <= count; base += depth) {
#pragma unroll
        for (int slot = 0; slot < depth; ++slot) {
            consume(slot, base + slot);
            load(slot, base + slot + depth);
        }
    }
    for (; base < count; base += depth) {
#pragma unroll
        for (int slot = 0; slot < depth; ++slot) {
            if (base + slot < count) consume(slot, base + slot);
            if (base + slot + depth < count) load(slot, base + slot + depth);
        }
    }
    store_tile(partial[warp][0], gate_sums, group, member);
    store_tile(partial[warp][1], up_sums, group, member);
    __syncthreads();

    for (int cell = thread; cell < rows * tiles * tile_rows; cell += blockDim.x) {
        const int token = cell / (tiles * tile_rows), row = cell % (tiles * tile_rows);
        const int first_warp = row / tile_rows * warps_per_tile, target = blockIdx.x * tiles * tile_rows + row;
        if (target >= height) continue;
        float gate_sum = 0.0f, up_sum = 0.0f;
        for (int index = 0; index < warps_per_tile; ++index) {
            gate_sum += partial[first_warp + index][0][token][row % tile_rows];
            up_sum += partial[first_warp + index][1][token][row % tile_rows];
        }
        const float opened = gate_sum / (1.0f + __expf(-gate_sum));
        inner[static_cast<long long>(token) * height + target] = narrow(opened * up_sum);
    }
}

}  // namespace

// product_plain, product_normalised: y [rows, height] = h(x) [rows, width] times the transpose of the stacked weights
// [height1, width], [height2, width], [height3, width], plus an optional residual [rows, height], rounded once.
//   height  height1 + height2 + height3, each a multiple of 16, absent ones null and 0; width a multiple of 64
//   x       rows `x_stride` values apart, a multiple of 8; y must not overlap x, nor the residual of another row
//   h       plain: the row itself; normalised: bf16(x * rsqrt(mean(x * x) + epsilon) * gain)
//   grid    (height / 16, 1, 1); block (256, 1, 1): eight warps share the columns
//   shared  dynamic bytes: plain 8 * 12288; normalised (rows + 1) * (width + 32) * 2
extern "C" __global__ void __launch_bounds__(256, 2) product_plain(
    const bf16* x, long long x_stride, const bf16* weight1, int height1, const bf16* weight2, int height2,
    const bf16* weight3, int height3, const bf16* residual, bf16* y, int rows, int width) {
    product<false>(x, x_stride, weight1, height1, weight2, height2, weight3, height3, nullptr, 0.0f, residual, y, rows,
                   width);
}

extern "C" __global__ void __launch_bounds__(256, 3) product_normalised(
    const bf16* x, long long x_stride, const bf16* weight1, int height1, const bf16* weight2, int height2,
    const bf16* weight3, int height3, const bf16* gain, float epsilon, const bf16* residual, bf16* y, int rows,
    int width) {
    product<true>(x, x_stride, weight1, height1, weight2, height2, weight3, height3, gain, epsilon, residual, y, rows, width);
}

// gated_product_1, gated_product_2: inner [rows, height] = bf16(silu(h(x) * gate transposed) * (h(x) * up transposed)).
//   h       as product_normalised
//   height  a multiple of 16; width a multiple of 64; x_stride a multiple of 8
//   grid    height / 16 / n, rounded up, with n the number in the name; block n * 128. With few rows, small blocks
//           share the work more evenly; with many, the staged rows leave room for fewer blocks. The sums do not differ.
//   shared  dynamic bytes: (rows + 1) * (width + 32) * 2
extern "C" __global__ void __launch_bounds__(128, 6) gated_product_1(
    const bf16* x, long long x_stride, const bf16* gate, const bf16* up, int height, const bf16* gain,
    float epsilon, bf16* inner, int rows, int width) {
    gated<1>(x, x_stride, gate, up, height, gain, epsilon, inner, rows, width);
}

extern "C" __global__ void __launch_bounds__(256, 3) gated_product_2(
    const bf16* x, long long x_stride, const bf16* gate, const bf16* up, int height, const bf16* gain,
    float epsilon, bf16* inner, int rows, int width) {
    gated<2>(x, x_stride, gate, up, height, gain, epsilon, inner, rows, width);
}

// attend_128, attend_64: for each chunk, normalises and rotates the queries and keys, writes the new keys and values to
// the pools, and attends. A chunk is 1 to 8 rows of qkv that extend one KV cache. The number is the head size.
//   qkv     [rows, (query_heads + 2 * key_heads) * size]: queries, keys, values; query_heads is 1 to 16 times key_heads
//   gains   [size] for queries and for keys; null: no normalisation
//   cosines, sines  [rows, size / 2], by row of the call; value i is rotated with value i + size / 2
//   output  [rows, query_heads * size]
//   window  a query at position p sees only keys at positions above p - window; 0: no limit
//   chunks  up to 8 by value; pools are [pool rows, capacity, key_heads, size]; `row` is the chunk's pool row, `past`
//           its length before the call, `first_row` its first row in qkv; capacity is at least past + length
//           sees_chunk: 1 where a row sees all rows of its chunk, 0 where it sees those up to itself
//   grid    (most pieces of any chunk, key_heads * tiles, chunks),
//           tiles = (longest length * query_heads / key_heads + 15) / 16,
//           pieces = ceil((past + 8) / span), span = 128 * ceil((past + 8) / (past + 8 > 8192 ? 4096 : 2048));
//           there are at most 32 pieces
//   block   (128, 1, 1); shared  dynamic bytes: 512 * (size + 8)
//   workspace  grid.x * grid.y * grid.z * 16 * (size + 2) * 4 bytes; counters  grid.y * grid.z words,
//           zero at first and zero again after every call; calls that may run at the same time need their own
extern "C" __global__ void __launch_bounds__(attend_threads) attend_128(
    const bf16* qkv, const bf16* query_gain, const bf16* key_gain, const bf16* cosines, const bf16* sines,
    bf16* output, float* workspace, unsigned* counters, int query_heads, int key_heads, float epsilon, float scale,
    int window, const __grid_constant__ Chunks chunks) {
    attend<128>(qkv, query_gain, key_gain, cosines, sines, output, workspace, counters, query_heads, key_heads, epsilon,
                scale, window, chunks);
}

extern "C" __global__ void __launch_bounds__(attend_threads) attend_64(
    const bf16* qkv, const bf16* query_gain, const bf16* key_gain, const bf16* cosines, const bf16* sines,
    bf16* output, float* workspace, unsigned* counters, int query_heads, int key_heads, float epsilon, float scale,
    int window, const __grid_constant__ Chunks chunks) {
    attend<64>(qkv, query_gain, key_gain, cosines, sines, output, workspace, counters, query_heads, key_heads, epsilon,
               scale, window, chunks);
}
