// Distances of a drafter's bfloat16 logits from labels and from a target's logits, and the gradients of losses made of
// them. This does on the GPU what losses.cpp does on the CPU, but measuring leaves the logits as they are. Each row has
// one thread block, which reads it twice.

// Columns of a row's result.
enum Found { kDraftLog, kTargetLog, kCrossEntropy, kL1, kOverlap, kSoftCrossEntropy, kDivergence, kAgreement, kSigned, kFound };

struct Logits {
  const bf16 *base, *bias, *target;  // of the row; bias is null if there is none
  float cap;                         // 0 if there is none

  __device__ float capped(float logit) const { return cap == 0.0f ? logit : cap * tanhf(logit / cap); }
  __device__ float draft(float base_logit, float bias_logit) const { return capped(base_logit) + bias_logit; }
};

// Calls `each(first, draft, target)` with the logits of this thread's tokens from `first` on. It passes eight tokens at
// a time if `by_eight` says that rows are aligned for it, else one.
template <typename Each>
__device__ __forceinline__ void for_tokens(const Logits& row, long long vocab, bool by_eight, Each each) {
  if (by_eight) {
    for (long long first = threadIdx.x * 8; first < vocab; first += blockDim.x * 8) {
      const Eight base = *reinterpret_cast<const Eight*>(row.base + first);
      const Eight target = *reinterpret_cast<const Eight*>(row.target + first);
      const Eight bias = row.bias ? *reinterpret_cast<const Eight*>(row.bias + first) : Eight{};
      float ours[8], theirs[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        ours[i] = row.draft(wide(base.of[i]), wide(bias.of[i]));
        theirs[i] = row.capped(wide(target.of[i]));
      }
      each(first, ours, theirs);
    }
    return;
  }
  for (long long token = threadIdx.x; token < vocab; token += blockDim.x) {
    const float ours[1] = {row.draft(wide(row.base[token]), row.bias ? wide(row.bias[token]) : 0.0f)};
    const float theirs[1] = {row.capped(wide(row.target[token]))};
    each(token, ours, theirs);
  }
}

// The largest logit and its token, and the sum of exp(logit - largest) over all logits.
struct Peak {
  float most, sum;
  long long token;
  bool is_number;

  template <int kCount>
  __device__ void add(long long first, const float (&logits)[kCount]) {
    float largest = logits[0], all = 0.0f;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      all += logits[i];
      if (logits[i] > largest) largest = logits[i], at = i;
    }
    is_number &= all == all;
    if (largest > most) {
      sum *= __expf(most - largest);
      most = largest, token = first + at;
    }
    if (most == -__int_as_float(0x7f800000)) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += __expf(logits[i] - most);
  }

  __device__ void join(const Peak& other) {
    is_number &= other.is_number;
    if (other.sum == 0.0f) return;
    const bool is_theirs = other.most > most || (other.most == most && other.token < token) || sum == 0.0f;
    const float top = is_theirs ? other.most : most;
    sum = (sum == 0.0f ? 0.0f : sum * __expf(most - top)) + other.sum * __expf(other.most - top);
    if (is_theirs) most = other.most, token = other.token;
  }

  __device__ Peak from(int apart) const {
    Peak other;
    other.most = __shfl_xor_sync(~0u, most, apart);
    other.sum = __shfl_xor_sync(~0u, sum, apart);
    other.token = __shfl_xor_sync(~0u, token, apart);
    other.is_number = __shfl_xor_sync(~0u, is_number, apart);
    return other;
  }

  __device__ float log_sum() const { return is_number ? most + logf(sum) : __int_as_float(0x7fffffff); }
};

// Joins the peaks of all threads of a block; `space` holds one for each warp.
__device__ __forceinline__ Peak block_peak(Peak peak, Peak* space) {
  for (int apart = 16; apart > 0; apart >>= 1) peak.join(peak.from(apart));
  if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = peak;
  __syncthreads();
  peak = space[0];
  for (int warp = 1; warp < blockDim.x / 32; ++warp) peak.join(space[warp]);
  return peak;
}

struct Rows {
  bf16 *base, *bias;             // of the drafter; bias is null if it is added already
  const bf16* target;            // of all target rows
  const long long* source;       // each row's target row; null if it has the same index
  const long long* labels;
  long long vocab, base_line, bias_line, target_line;
  float cap;
  int by_eight;

  __device__ Logits row(long long row) const {
    const long long theirs = source ? source[row] : row;
    return {base + row * base_line, bias ? bias + row * bias_line : nullptr, target + theirs * target_line, cap};
  }
};

// Launched with one block of 512 threads per row; `found` is [rows, kFound].
extern "C" __global__ void __launch_bounds__(512) measure_logits(Rows rows, float* found) {
  const Logits row = rows.row(blockIdx.x);
  __shared__ Peak peaks[2][16];
  __shared__ float space[16];
  const Peak none{-__int_as_float(0x7f800000), 0.0f, 0, true};
  Peak draft = none, target = none;
  for_tokens(row, rows.vocab, rows.by_eight, [&](long long first, const auto& ours, const auto& theirs) {
    draft.add(first, ours);
    target.add(first, theirs);
  });
  draft = block_peak(draft, peaks[0]);
  target = block_peak(target, peaks[1]);
  const float draft_log = draft.log_sum(), target_log = target.log_sum();
  float l1 = 0.0f, overlap = 0.0f, cross = 0.0f, entropy = 0.0f, weight = 0.0f, along = 0.0f;
  for_tokens(row, rows.vocab, rows.by_eight, [&](long long, const auto& ours, const auto& theirs) {
    constexpr int kCount = sizeof(ours) / sizeof(float);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float p = __expf(ours[i] - draft_log), t = __expf(theirs[i] - target_log), apart = p - t;
      l1 += fabsf(apart);
      overlap += fminf(p, t);
      // A token without probability must contribute nothing, even if its log probability is infinite.
      cross += t == 0.0f ? 0.0f : t * (draft_log - ours[i]);
      entropy += t == 0.0f ? 0.0f : t * (target_log - theirs[i]);
      weight += t;
      along += apart > 0.0f ? p : apart < 0.0f ? -p : 0.0f;
    }
  });
  l1 = block_sum(l1, space), overlap = block_sum(overlap, space), cross = block_sum(cross, space);
  entropy = block_sum(entropy, space), weight = block_sum(weight, space), along = block_sum(along, space);
  if (threadIdx.x > 0) return;
  const long long label = rows.labels[blockIdx.x];
  const float chosen = row.draft(wide(row.base[label]), row.bias ? wide(row.bias[label]) : 0.0f);
  float* out = found + blockIdx.x * kFound;
  out[kDraftLog] = draft_log;
  out[kTargetLog] = target_log;
  out[kCrossEntropy] = draft_log - chosen;
  out[kL1] = l1;
  out[kOverlap] = overlap;
  // Due to rounding, the probabilities do not sum to exactly 1.
  out[kSoftCrossEntropy] = cross / weight;
  out[kDivergence] = (cross - entropy) / weight;
  out[kAgreement] = draft.token == target.token ? 1.0f : 0.0f;
  out[kSigned] = along;
}

// Overwrites the drafter's logits with their gradients: the bias if there is one, and the base if there is no bias or a
// cap. `factors` [rows, 3] scale p^d - onehot(label), p^d - p^t, and the gradient of |p^d - p^t|. The grid is (rows,
// pieces).
extern "C" __global__ void __launch_bounds__(256) slope_logits(Rows rows, const float* found, const float* factors, long long piece) {
  const Logits row = rows.row(blockIdx.x);
  const float draft_log = found[blockIdx.x * kFound + kDraftLog], target_log = found[blockIdx.x * kFound + kTargetLog];
  const float by_label = factors[blockIdx.x * 3], by_soft = factors[blockIdx.x * 3 + 1], by_l1 = factors[blockIdx.x * 3 + 2];
  const float along = by_label + by_soft - by_l1 * found[blockIdx.x * kFound + kSigned];
  const long long label = rows.labels[blockIdx.x];
  bf16* base_out = rows.base + blockIdx.x * rows.base_line;
  bf16* bias_out = rows.bias ? rows.bias + blockIdx.x * rows.bias_line : nullptr;
  const auto slope = [&](long long token, float ours, float theirs) {
    const float p = __expf(ours - draft_log), t = __expf(theirs - target_log);
    const float sign = p > t ? by_l1 : p < t ? -by_l1 : 0.0f;
    return p * (along + sign) - (by_soft == 0.0f ? 0.0f : by_soft * t) - (token == label ? by_label : 0.0f);
  };
  // The derivative of the soft cap; 1 without a cap.
  const auto steepness = [&](float base) {
    const float bent = rows.cap == 0.0f ? 0.0f : tanhf(base / rows.cap);
    return 1.0f - bent * bent;
  };
  const long long begin = blockIdx.y * piece, end = min(rows.vocab, begin + piece);
  if (rows.by_eight) {
    for (long long first = begin + threadIdx.x * 8; first < end; first += blockDim.x * 8) {
      Eight base = *reinterpret_cast<const Eight*>(row.base + first);
      Eight bias = row.bias ? *reinterpret_cast<const Eight*>(row.bias + first) : Eight{};
      const Eight target = *reinterpret_cast<const Eight*>(row.target + first);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float logit = wide(base.of[i]);
        const float by_logit = slope(first + i, row.draft(logit, wide(bias.of[i])), row.capped(wide(target.of[i])));
        bias.of[i] = narrow(by_logit);
        base.of[i] = narrow(by_logit * steepness(logit));
      }
      if (bias_out) *reinterpret_cast<Eight*>(bias_out + first) = bias;
      if (!bias_out || rows.cap != 0.0f) *reinterpret_cast<Eight*>(base_out + first) = base;
    }
    return;
  }
  for (long long token = begin + threadIdx.x; token < end; token += blockDim.x) {
    const float logit = wide(row.base[token]);
    const float ours = row.draft(logit, row.bias ? wide(row.bias[token]) : 0.0f);
    const float by_logit = slope(token, ours, row.capped(wide(row.target[token])));
    if (bias_out) bias_out[token] = narrow(by_logit);
    if (!bias_out || rows.cap != 0.0f) base_out[token] = narrow(by_logit * steepness(logit));
  }
}
