// Rotary embeddings and SiLU gates of bfloat16 rows on a GPU; the kernels are in src/cuda/rows.cu.
#include "gpu.h"

#include <cstdint>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

namespace on_gpu {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool halves(const at::Tensor& tensor) {
  return tensor.is_cuda() && tensor.scalar_type() == at::kBFloat16 && tensor.is_contiguous() && tensor.numel() > 0;
}

at::Tensor turned(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines, float by) {
  at::Tensor out = at::empty_like(x);
  const gpu::Shape shape{{static_cast<unsigned>(x.size(0)), 1, 1}, 256};
  gpu::run(gpu::Text::kRows, "rotate", shape, x, x.const_data_ptr(), cosines.const_data_ptr(), sines.const_data_ptr(), out.data_ptr(),
           static_cast<int>(x.size(1)), static_cast<int>(x.size(2)), by);
  return out;
}

struct Rotation : torch::autograd::Function<Rotation> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines) {
    ctx->save_for_backward({cosines, sines});
    return turned(x, cosines, sines, 1.0f);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    return {turned(gradients[0].contiguous(), saved[0], saved[1], -1.0f), at::Tensor(), at::Tensor()};
  }
};

// Whether there are kernels for x [N, heads, D] with cosines and sines [N, 1, D/2].
bool can_be_turned(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines) {
  const auto fits = [&](const at::Tensor& of) {
    return halves(of) && of.device() == x.device() && of.dim() == 3 && of.size(0) == x.size(0) && of.size(1) == 1 && 2 * of.size(2) == x.size(2) &&
           !learns(of);
  };
  return halves(x) && x.dim() == 3 && fits(cosines) && fits(sines) && gpu::has_kernels(x, gpu::Text::kRows);
}

gpu::Shape by_eights(long long eights) { return {{static_cast<unsigned>((eights + 255) / 256), 1, 1}, 256}; }

at::Tensor gated(const at::Tensor& gate, const at::Tensor& up) {
  at::Tensor out = at::empty_like(gate);
  const long long eights = gate.numel() / 8;
  gpu::run(gpu::Text::kRows, "gate", by_eights(eights), gate, gate.const_data_ptr(), up.const_data_ptr(), out.data_ptr(), eights);
  return out;
}

struct Gate : torch::autograd::Function<Gate> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up) {
    ctx->save_for_backward({gate, up});
    return gated(gate, up);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    // The kernel reads 16 bytes at a time, and a contiguous view may be aligned to less.
    at::Tensor slope = gradients[0].contiguous();
    if (reinterpret_cast<uintptr_t>(slope.const_data_ptr()) % 16 != 0) slope = slope.clone();
    at::Tensor by_gate = at::empty_like(slope), by_up = at::empty_like(slope);
    const long long eights = slope.numel() / 8;
    gpu::run(gpu::Text::kRows, "gate_back", by_eights(eights), slope, saved[0].const_data_ptr(), saved[1].const_data_ptr(), slope.const_data_ptr(),
             by_gate.data_ptr(), by_up.data_ptr(), eights);
    return {by_gate, by_up};
  }
};

bool can_be_gated(const at::Tensor& gate, const at::Tensor& up) {
  const auto lies = [](const at::Tensor& of) { return halves(of) && reinterpret_cast<uintptr_t>(of.const_data_ptr()) % 16 == 0; };
  return lies(gate) && lies(up) && gate.device() == up.device() && gate.sizes() == up.sizes() && gate.numel() % 8 == 0 &&
         gpu::has_kernels(gate, gpu::Text::kRows);
}

}  // namespace on_gpu
