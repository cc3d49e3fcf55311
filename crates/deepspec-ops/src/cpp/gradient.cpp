// Gradients of parameters.
#include "operators.h"

#include <utility>

extern "C" {

// Moves the gradient out of a parameter; returns null if it has none.
at::Tensor* ds_take_gradient(const at::Tensor* parameter) {
  return made([&]() -> at::Tensor {
    if (!parameter->is_leaf() || !parameter->requires_grad()) return {};
    return std::exchange(parameter->mutable_grad(), at::Tensor());
  });
}
}
