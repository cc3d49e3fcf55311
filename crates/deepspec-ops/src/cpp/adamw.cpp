// One AdamW step over many tensors, which reads and writes each tensor once, and the sum of squares for gradient
// clipping.
#include "group.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/record_function.h>

namespace {

// Elements that one task processes.
constexpr int64_t kShare = 1 << 16;

struct AdamWTensors {
  at::Tensor* weights;
  at::Tensor* gradient;
  at::Tensor* exp_avg;
  at::Tensor* exp_avg_sq;
};

struct AdamWSettings {
  double lr, beta1, beta2, weight_decay, eps, step;
};

// Factors of the update that are the same for every element.
struct AdamWFactors {
  float decay, of_new, beta2, of_new_square, step_size, root_correction, eps, divisor;

  AdamWFactors(const AdamWSettings& settings, float divisor)
      : decay(static_cast<float>(1.0 - settings.lr * settings.weight_decay)),
        of_new(static_cast<float>(1.0 - settings.beta1)),
        beta2(static_cast<float>(settings.beta2)),
        of_new_square(static_cast<float>(1.0 - settings.beta2)),
        step_size(static_cast<float>(settings.lr / (1.0 - std::pow(settings.beta1, settings.step)))),
        root_correction(static_cast<float>(std::sqrt(1.0 - std::pow(settings.beta2, settings.step)))),
        eps(static_cast<float>(settings.eps)),
        divisor(divisor) {}
};

DEEPSPEC_VECTORS void adamw_share(
    float* __restrict weights, float* __restrict gradients, float* __restrict exp_avgs, float* __restrict exp_avg_sqs, int64_t count,
    AdamWFactors by) {
  for (int64_t i = 0; i < count; ++i) {
    const float gradient = gradients[i] / by.divisor;
    gradients[i] = 0.0f;
    const float exp_avg = exp_avgs[i] + by.of_new * (gradient - exp_avgs[i]);
    const float exp_avg_sq = by.beta2 * exp_avg_sqs[i] + by.of_new_square * gradient * gradient;
    exp_avgs[i] = exp_avg, exp_avg_sqs[i] = exp_avg_sq;
    weights[i] = weights[i] * by.decay - by.step_size * exp_avg / (std::sqrt(exp_avg_sq) / by.root_correction + by.eps);
  }
}

void adamw_here(const AdamWTensors& tensors, const AdamWFactors& by) {
  const int64_t count = tensors.weights->numel();
  float *weights = tensors.weights->mutable_data_ptr<float>(), *gradients = tensors.gradient->mutable_data_ptr<float>(),
        *exp_avgs = tensors.exp_avg->mutable_data_ptr<float>(), *exp_avg_sqs = tensors.exp_avg_sq->mutable_data_ptr<float>();
  // Every in-place operator bumps the version: autograd then detects a graph that still needs the old values.
  for (const at::Tensor* each : {tensors.weights, tensors.gradient, tensors.exp_avg, tensors.exp_avg_sq})
    each->unsafeGetTensorImpl()->bump_version();
  for_tasks((count + kShare - 1) / kShare, 1, [=](int64_t share) {
    const int64_t at = share * kShare;
    adamw_share(weights + at, gradients + at, exp_avgs + at, exp_avg_sqs + at, std::min(kShare, count - at), by);
  });
}

DEEPSPEC_VECTORS double square_sum_of_share(const float* values, int64_t count) {
  return summed(count, [=](int64_t i) DEEPSPEC_INLINED { return values[i] * values[i]; });
}

// Whether all four tensors are contiguous float32 on the CPU and have one shape.
bool are_alike(const AdamWTensors& tensors) {
  const at::Tensor& weights = *tensors.weights;
  for (const at::Tensor* each : {tensors.gradient, tensors.exp_avg, tensors.exp_avg_sq})
    if (!plain(*each) || each->sizes() != weights.sizes()) return false;
  return plain(weights);
}

}  // namespace

extern "C" {

// All tensors are contiguous float32 on one device, and the four tensors of an entry have one shape. `divisor` is a
// float32 scalar on that device; the gradients are divided by it before the step. On the CPU the step also sets the
// gradients to zero.
char* ds_adamw(const AdamWTensors* tensors, size_t count, at::Tensor* divisor, const AdamWSettings* settings) {
  return caught([&] {
    if (divisor->device().is_cpu()) {
      RECORD_USER_SCOPE("adamw");
      for (size_t i = 0; i < count; ++i) TORCH_CHECK(are_alike(tensors[i]), "tensors of other shapes or kinds");
      const AdamWFactors factors(*settings, divisor->item<float>());
      for (size_t i = 0; i < count; ++i) adamw_here(tensors[i], factors);
      return;
    }
    std::vector<at::Tensor> weights, gradients, exp_avgs, exp_avg_sqs, steps;
    for (size_t i = 0; i < count; ++i) {
      weights.push_back(*tensors[i].weights);
      gradients.push_back(*tensors[i].gradient);
      exp_avgs.push_back(*tensors[i].exp_avg);
      exp_avg_sqs.push_back(*tensors[i].exp_avg_sq);
      steps.push_back(at::full({}, settings->step, tensors[i].weights->options()));
    }
    at::_fused_adamw_(weights, gradients, exp_avgs, exp_avg_sqs, {}, steps, settings->lr, settings->beta1, settings->beta2,
                      settings->weight_decay, settings->eps, /*amsgrad=*/false, /*maximize=*/false, *divisor);
  });
}

// Returns the sum of squares of a contiguous float32 CPU tensor as a float64 scalar. It does not depend on the number
// of threads.
at::Tensor* ds_square_sum(const at::Tensor* values) {
  return made([&]() -> at::Tensor {
    if (!plain(*values)) return {};
    RECORD_USER_SCOPE("square_sum");
    const int64_t count = values->numel(), shares = (count + kShare - 1) / kShare;
    std::vector<double> sums(shares);
    const float* from = values->const_data_ptr<float>();
    for_tasks(shares, 1, [&](int64_t share) {
      sums[share] = square_sum_of_share(from + share * kShare, std::min(kShare, count - share * kShare));
    });
    double sum = 0.0;
    for (double each : sums) sum += each;
    return at::full({}, sum, values->options().dtype(at::kDouble));
  });
}
}
