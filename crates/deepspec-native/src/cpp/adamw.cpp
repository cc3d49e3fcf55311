// One step of AdamW over many tensors, each of which is read and written once.
#include "group.h"

#include <vector>

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>

extern "C" {

struct AdamWTensors {
  at::Tensor* weights;
  at::Tensor* gradient;
  at::Tensor* exp_avg;
  at::Tensor* exp_avg_sq;
};

struct AdamWSettings {
  double lr, beta1, beta2, weight_decay, eps, step;
};

// All tensors are float32 and contiguous, those of one entry of one shape and device; `divisor` is a float32 scalar by which
// the gradients are divided first, in place.
char* ds_adamw(const AdamWTensors* tensors, size_t count, at::Tensor* divisor, const AdamWSettings* settings) {
  return caught([&] {
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
}
