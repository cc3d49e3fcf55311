// Fused operators over bfloat16 rows, forward and backward: rotary embeddings and SiLU gates.

// Rotates the planes (i, dim/2 + i) of `x` [rows, heads, dim] by angles with cosines and sines [rows, dim/2]. `by` is
// 1, or -1 to rotate back. One thread block per row.
extern "C" __global__ void rotate(const bf16* x, const bf16* cosines, const bf16* sines, bf16* out, int heads, int dim, float by) {
  const int half = dim / 2;
  const long long row = blockIdx.x;
  for (int i = threadIdx.x; i < heads * half; i += blockDim.x) {
    const int plane = i % half;
    const long long at = (row * heads + i / half) * dim + plane;
    const float cosine = wide(cosines[row * half + plane]), sine = by * wide(sines[row * half + plane]);
    const float a = wide(x[at]), b = wide(x[at + half]);
    out[at] = narrow(a * cosine - b * sine);
    out[at + half] = narrow(b * cosine + a * sine);
  }
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// silu(gate) · up, for `eights` groups of eight values.
extern "C" __global__ void gate(const bf16* left, const bf16* right, bf16* out, long long eights) {
  const long long at = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  if (at >= eights) return;
  const Eight gates = reinterpret_cast<const Eight*>(left)[at], ups = reinterpret_cast<const Eight*>(right)[at];
  Eight values;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float gate = wide(gates.of[i]);
    values.of[i] = narrow(gate * sigmoid(gate) * wide(ups.of[i]));
  }
  reinterpret_cast<Eight*>(out)[at] = values;
}

// The gradients of the gate and of up, given the gradient of silu(gate) · up.
extern "C" __global__ void gate_back(const bf16* left, const bf16* right, const bf16* slope, bf16* by_left, bf16* by_right, long long eights) {
  const long long at = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  if (at >= eights) return;
  const Eight gates = reinterpret_cast<const Eight*>(left)[at], ups = reinterpret_cast<const Eight*>(right)[at];
  const Eight slopes = reinterpret_cast<const Eight*>(slope)[at];
  Eight to_left, to_right;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float gate = wide(gates.of[i]), along = wide(slopes.of[i]), open = sigmoid(gate), silu = gate * open;
    to_left.of[i] = narrow(along * wide(ups.of[i]) * (open + silu * (1.0f - open)));
    to_right.of[i] = narrow(along * silu);
  }
  reinterpret_cast<Eight*>(by_left)[at] = to_left;
  reinterpret_cast<Eight*>(by_right)[at] = to_right;
}
