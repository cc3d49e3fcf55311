// Shared by the kernels: conversions of bfloat16, vectors of eight values, and sums over a thread block.
using bf16 = unsigned short;

__device__ __forceinline__ float wide(bf16 value) { return __uint_as_float(static_cast<unsigned>(value) << 16); }

// Rounds to the nearest value, ties to even.
__device__ __forceinline__ bf16 narrow(float value) {
  bf16 rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
  return rounded;
}

// Eight values that are loaded and stored at once.
struct __align__(16) Eight {
  bf16 of[8];
};

// The sum over the threads of a block of whole warps, in the same order every time; every thread gets it. `space` holds
// one number for each warp.
__device__ __forceinline__ float block_sum(float value, float* space) {
  for (int apart = 16; apart > 0; apart >>= 1) value += __shfl_xor_sync(~0u, value, apart);
  __syncthreads();
  if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += space[warp];
  return sum;
}
