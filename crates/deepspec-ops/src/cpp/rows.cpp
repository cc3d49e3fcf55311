// Fused operators over float32 rows on the CPU, forward and backward, each in one pass. libtorch composes them of two
// to nine operators. They save only their inputs for the backward. A row's result does not depend on the other rows.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include "operators.h"

// Compiles one version per vector width; the processor's version is chosen when the program starts.
#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 12
#define DEEPSPEC_VECTORS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DEEPSPEC_VECTORS
#endif

// For functions that such functions call: compiled separately, they would use the narrowest vectors.
#if defined(__GNUC__)
#define DEEPSPEC_INLINED __attribute__((always_inline))
#else
#define DEEPSPEC_INLINED
#endif
#define DEEPSPEC_INLINE inline DEEPSPEC_INLINED

namespace {

// Partial sums side by side, so that the order of summation is the same on every machine.
constexpr int64_t kLanes = 16;
// Rows whose weight gradients are summed as a group before the groups are added. The result does not depend on the
// number of threads.
constexpr int64_t kSummed = 64;

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Returns the sum of `lanes` and overwrites them. It adds halves of sizes known at compile time; a loop went through
// memory.
template <int64_t kHalf = kLanes / 2>
DEEPSPEC_INLINE float folded(float* lanes) {
  for (int64_t lane = 0; lane < kHalf; ++lane) lanes[lane] += lanes[lane + kHalf];
  if constexpr (kHalf > 1) return folded<kHalf / 2>(lanes);
  return lanes[0];
}

// The largest value, NaN ignored; -infinity if there is none.
DEEPSPEC_INLINE float largest(const float* x, int64_t count) {
  float lanes[kLanes];
  for (float& lane : lanes) lane = kLowest;
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    // If it were unrolled first, it would not be vectorised any more.
#pragma GCC unroll 1
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
  float found = kLowest;
  for (int64_t i = whole; i < count; ++i) found = x[i] > found ? x[i] : found;
  for (float lane : lanes) found = lane > found ? lane : found;
  return found;
}

// e^x for x <= 0, to 3 units in the last place; 0 below -87.
DEEPSPEC_INLINE float exponential(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = clamped * 1.44269504f + kRound;
  const float whole = shifted - kRound;
  const float rest = (clamped - whole * 0.693145752f) - whole * 1.42860677e-6f;
  float p = 1.38888889e-3f;
  p = p * rest + 8.33333333e-3f;
  p = p * rest + 4.16666667e-2f;
  p = p * rest + 1.66666667e-1f;
  p = p * rest + 0.5f;
  p = p * rest + 1.0f;
  p = p * rest + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3f800000;  // the lowest bits hold the whole number
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? 0.0f : p * power;
}

// 1 / (1 + e^-x).
DEEPSPEC_INLINE float sigmoid(float x) {
  const float power = exponential(x < 0.0f ? x : -x), inverse = 1.0f / (1.0f + power);
  return x < 0.0f ? power * inverse : inverse;
}

// 1 / sqrt(mean(x * x) + eps).
DEEPSPEC_INLINE float inverse_rms(const float* x, int64_t width, float eps) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += x[i + lane] * x[i + lane];
  for (; i < width; ++i) lanes[0] += x[i] * x[i];
  return 1.0f / std::sqrt(folded(lanes) / static_cast<float>(width) + eps);
}

DEEPSPEC_VECTORS void norm_row(const float* x, const float* weight, float eps, int64_t width, float* out) {
  const float inverse = inverse_rms(x, width, eps);
  for (int64_t i = 0; i < width; ++i) out[i] = x[i] * inverse * weight[i];
}

DEEPSPEC_VECTORS void add_row(float* __restrict to, const float* __restrict row, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += row[i];
}

// Given `slope`, the gradient of the output, writes the gradient of the input to `by_x` and adds that of the weight to
// `by_weight`. Either may be null.
DEEPSPEC_VECTORS void norm_row_back(
    const float* x, const float* weight, float eps, const float* slope, int64_t width, float* by_x, float* by_weight) {
  const float inverse = inverse_rms(x, width, eps);
  if (by_weight)
    for (int64_t i = 0; i < width; ++i) by_weight[i] += slope[i] * x[i] * inverse;
  if (!by_x) return;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += slope[i + lane] * weight[i + lane] * x[i + lane];
  for (; i < width; ++i) lanes[0] += slope[i] * weight[i] * x[i];
  const float along = folded(lanes) / static_cast<float>(width) * inverse * inverse;
  for (i = 0; i < width; ++i) by_x[i] = inverse * (slope[i] * weight[i] - along * x[i]);
}

// Rotates by the angles with these cosines and sines, or back if `sign` is -1.
DEEPSPEC_VECTORS void rotate_row(const float* x, const float* cosines, const float* sines, float sign, int64_t half, float* out) {
  for (int64_t i = 0; i < half; ++i) {
    const float sine = sign * sines[i];
    out[i] = x[i] * cosines[i] - x[half + i] * sine;
    out[half + i] = x[half + i] * cosines[i] + x[i] * sine;
  }
}

DEEPSPEC_VECTORS void gate_row(const float* gate, const float* up, int64_t width, float* out) {
  for (int64_t i = 0; i < width; ++i) out[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

// Given the gradient of silu(gate) * up in `slope`, overwrites it with the gradient of up and writes the gradient of
// the gate to `by_gate`.
DEEPSPEC_VECTORS void gate_row_back(const float* gate, const float* up, int64_t width, float* slope, float* by_gate) {
  for (int64_t i = 0; i < width; ++i) {
    const float share = sigmoid(gate[i]), along = slope[i];
    slope[i] = along * gate[i] * share;
    by_gate[i] = along * up[i] * share * (1.0f + gate[i] * (1.0f - share));
  }
}

// The index of the first of the largest values; -1 if a value is NaN.
DEEPSPEC_VECTORS int64_t first_of_largest(const float* x, int64_t width) {
  float lanes[kLanes];
  int32_t odd[kLanes] = {};
  for (float& lane : lanes) lane = x[0];
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
      odd[lane] |= x[i + lane] != x[i + lane];
    }
  for (; i < width; ++i) {
    lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
    odd[0] |= x[i] != x[i];
  }
  float most = lanes[0];
  int32_t any = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    most = lanes[lane] > most ? lanes[lane] : most;
    any |= odd[lane];
  }
  if (any) return -1;
  // The index is searched lane by lane, too.
  for (i = 0; i + kLanes <= width; i += kLanes) {
    int32_t found = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) found |= x[i + lane] == most;
    if (found) break;
  }
  return std::find(x + i, x + width, most) - x;
}

// x [.., d] and weight [d].
at::Tensor normed(const at::Tensor& x, const at::Tensor& weight, float eps) {
  at::Tensor out = at::empty_like(x);
  const int64_t width = weight.numel();
  const float *from = x.const_data_ptr<float>(), *scale = weight.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for_rows(out, width, [=](int64_t row) { norm_row(from + row * width, scale, eps, width, to + row * width); });
  return out;
}

// x [N, heads, D], cosines and sines [N, 1, D/2].
at::Tensor rotated(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines, float sign) {
  at::Tensor out = at::empty_like(x);
  const int64_t heads = x.size(1), width = x.size(2), half = width / 2;
  const float *from = x.const_data_ptr<float>(), *cos = cosines.const_data_ptr<float>(), *sin = sines.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for_rows(out, width, [=](int64_t row) {
    const int64_t angles = row / heads * half;
    rotate_row(from + row * width, cos + angles, sin + angles, sign, half, to + row * width);
  });
  return out;
}

// gate and up [.., d].
at::Tensor gated(const at::Tensor& gate, const at::Tensor& up) {
  at::Tensor out = at::empty_like(gate);
  const int64_t width = gate.size(-1);
  const float *left = gate.const_data_ptr<float>(), *right = up.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for_rows(out, width, [=](int64_t row) {
    gate_row(left + row * width, right + row * width, width, to + row * width);
  });
  return out;
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Norm : torch::autograd::Function<Norm> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight, double eps) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["eps"] = eps;
    return normed(x, weight, static_cast<float>(eps));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    RECORD_USER_SCOPE("rms_norm_backward");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor slope = gradients[0].contiguous();
    const float eps = static_cast<float>(ctx->saved_data["eps"].toDouble());
    const int64_t width = saved[1].numel(), rows = saved[0].numel() / width, groups = (rows + kSummed - 1) / kSummed;
    at::Tensor by_x, sums;
    if (ctx->needs_input_grad(0)) by_x = at::empty_like(saved[0]);
    if (ctx->needs_input_grad(1)) sums = at::zeros({std::max<int64_t>(1, groups), width}, slope.options());
    const float *x = saved[0].const_data_ptr<float>(), *weight = saved[1].const_data_ptr<float>(),
                *slopes = slope.const_data_ptr<float>();
    float* to = by_x.defined() ? by_x.mutable_data_ptr<float>() : nullptr;
    float* sum = sums.defined() ? sums.mutable_data_ptr<float>() : nullptr;
    for_tasks(groups, std::max<int64_t>(1, kGrain / (kSummed * width)), [=](int64_t group) {
      for (int64_t row = group * kSummed; row < std::min(rows, (group + 1) * kSummed); ++row) {
        const int64_t at = row * width;
        norm_row_back(x + at, weight, eps, slopes + at, width, to ? to + at : nullptr, sum ? sum + group * width : nullptr);
      }
    });
    if (!sum) return {by_x, at::Tensor(), at::Tensor()};
    for (int64_t group = 1; group < groups; ++group) add_row(sum, sum + group * width, width);
    // A copy, because autograd may keep it for good.
    return {by_x, sums.select(0, 0).clone().view_as(saved[1]), at::Tensor()};
  }
};

struct Turn : torch::autograd::Function<Turn> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines) {
    ctx->save_for_backward({cosines, sines});
    return rotated(x, cosines, sines, 1.0f);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    RECORD_USER_SCOPE("rotate_backward");
    const auto saved = ctx->get_saved_variables();
    return {rotated(gradients[0].contiguous(), saved[0], saved[1], -1.0f), at::Tensor(), at::Tensor()};
  }
};

at::Tensor gated_again(const at::Tensor& gate, const at::Tensor& up) {
  RECORD_USER_SCOPE("silu_times_again");
  return gated(gate, up);
}

// The backward recomputes the input of the matmul and then overwrites it with the gradient of the gate.
struct GatedProduct : torch::autograd::Function<GatedProduct> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight) {
    RECORD_USER_SCOPE("gated_product");
    ctx->save_for_backward({gate, up, weight});
    return projected(gated(gate, up), weight, multiplies_here());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &gate = saved[0], &up = saved[1], &weight = saved[2];
    const int64_t width = gate.size(-1);
    const at::Tensor slope = gradients[0].reshape({-1, weight.size(0)});
    at::Tensor by_gate, by_up, by_weight;
    if (ctx->needs_input_grad(2)) {
      by_gate = gated_again(gate, up);
      by_weight = weight_slope(slope, by_gate.view({-1, width}), weight, multiplies_here());
    }
    if (!ctx->needs_input_grad(0) && !ctx->needs_input_grad(1)) return {at::Tensor(), at::Tensor(), by_weight};
    by_up = times(slope, weight, multiplies_here()).view_as(up);
    RECORD_USER_SCOPE("silu_times_backward");
    if (!by_gate.defined()) by_gate = at::empty_like(gate);
    const float *left = gate.const_data_ptr<float>(), *right = up.const_data_ptr<float>();
    float *to_right = by_up.mutable_data_ptr<float>(), *to_left = by_gate.mutable_data_ptr<float>();
    for_rows(by_gate, width, [=](int64_t row) {
      const int64_t at = row * width;
      gate_row_back(left + at, right + at, width, to_right + at, to_left + at);
    });
    return {by_gate, by_up, by_weight};
  }
};

bool can_be_gated(const at::Tensor& gate, const at::Tensor& up) {
  return plain(gate) && plain(up) && gate.sizes() == up.sizes() && gate.dim() > 0 && gate.numel() > 0;
}

}  // namespace

extern "C" {

// x / rms(x) * weight over the last dimension.
at::Tensor* ds_rms_norm(const at::Tensor* x, const at::Tensor* weight, double eps) {
  return made([&]() -> at::Tensor {
    const int64_t width = weight->numel();
    if (!plain(*x) || !plain(*weight) || width == 0 || x->dim() == 0 || x->size(-1) != width) return {};
    RECORD_USER_SCOPE("rms_norm");
    if (learns(*x) || learns(*weight)) return Norm::apply(*x, *weight, eps);
    return normed(*x, *weight, static_cast<float>(eps));
  });
}

// The index of the first of the largest values of each row: [..] for x [.., V]; not differentiable.
at::Tensor* ds_argmax(const at::Tensor* x) {
  return made([&]() -> at::Tensor {
    if (!plain(*x) || x->dim() == 0 || x->numel() == 0) return {};
    RECORD_USER_SCOPE("argmax");
    const int64_t width = x->size(-1);
    at::Tensor out = at::empty(x->sizes().slice(0, x->dim() - 1), x->options().dtype(at::kLong));
    const float* from = x->const_data_ptr<float>();
    int64_t* to = out.mutable_data_ptr<int64_t>();
    for_tasks(
        out.numel(), std::max<int64_t>(1, kGrain / width),
        [=](int64_t row) { to[row] = first_of_largest(from + row * width, width); });
    // libtorch defines an order for NaN, so it handles tensors with NaN.
    return std::find(to, to + out.numel(), -1) == to + out.numel() ? out : at::Tensor();
  });
}

// Rotates the planes (i, D/2 + i) of x [N, heads, D], also in bfloat16 on a GPU. Cosines and sines are [N, 1, D/2] and
// require no gradient.
at::Tensor* ds_rotate(const at::Tensor* x, const at::Tensor* cosines, const at::Tensor* sines) {
  return made([&]() -> at::Tensor {
    if (on_gpu::can_be_turned(*x, *cosines, *sines))
      return learns(*x) ? on_gpu::Rotation::apply(*x, *cosines, *sines) : on_gpu::turned(*x, *cosines, *sines, 1.0f);
    if (!plain(*x) || !plain(*cosines) || !plain(*sines) || x->dim() != 3 || x->numel() == 0) return {};
    const int64_t width = x->size(2), needed = x->size(0) * (width / 2);
    if (width % 2 != 0 || cosines->numel() != needed || sines->numel() != needed) return {};
    if (learns(*cosines) || learns(*sines)) return {};
    RECORD_USER_SCOPE("rotate");
    return learns(*x) ? Turn::apply(*x, *cosines, *sines) : rotated(*x, *cosines, *sines, 1.0f);
  });
}

// gate * sigmoid(gate) * up, of one shape [.., d]; null on the CPU if a gradient is required.
at::Tensor* ds_silu_times(const at::Tensor* gate, const at::Tensor* up) {
  return made([&]() -> at::Tensor {
    if (on_gpu::can_be_gated(*gate, *up)) return learns(*gate) || learns(*up) ? on_gpu::Gate::apply(*gate, *up) : on_gpu::gated(*gate, *up);
    if (!can_be_gated(*gate, *up) || learns(*gate) || learns(*up)) return {};
    RECORD_USER_SCOPE("silu_times");
    return gated(*gate, *up);
  });
}

// silu(gate) * up times the transpose of a weight [outputs, d]; null if no gradient is required.
at::Tensor* ds_gated_product(const at::Tensor* gate, const at::Tensor* up, const at::Tensor* weight) {
  return made([&]() -> at::Tensor {
    if (!can_be_gated(*gate, *up) || !plain(*weight) || weight->dim() != 2 || weight->size(1) != gate->size(-1)) return {};
    if (!learns(*gate) && !learns(*up) && !learns(*weight)) return {};
    return GatedProduct::apply(*gate, *up, *weight);
  });
}
}
