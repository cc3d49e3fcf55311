// A gated MLP that learns: its three products and what lies between them, whose backward keeps its inputs and the two factors of the gate, and has two
// more of their size at a time.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

namespace {

// From the slopes by silu(gate) * up those by up, in their place, and by the gate.
DEEPSPEC_VECTORS void gate_row_back(const float* gate, const float* up, int64_t width, float* slope, float* by_gate) {
  for (int64_t i = 0; i < width; ++i) {
    const float share = sigmoid(gate[i]), along = slope[i];
    slope[i] = along * gate[i] * share;
    by_gate[i] = along * up[i] * share * (1.0f + gate[i] * (1.0f - share));
  }
}

struct GatedMlp : torch::autograd::Function<GatedMlp> {
  static at::Tensor forward(
      AutogradContext* ctx, const at::Tensor& x, const at::Tensor& to_gate, const at::Tensor& to_up, const at::Tensor& down) {
    const bool here = multiplies_here();
    const at::Tensor gate = projected(x, to_gate, here), up = projected(x, to_up, here);
    ctx->save_for_backward({x, gate, up, to_gate, to_up, down});
    return projected(gated(gate, up), down, here);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const bool here = multiplies_here();
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &gate = saved[1], &up = saved[2], &to_gate = saved[3], &to_up = saved[4], &down = saved[5];
    const int64_t width = down.size(1);
    const at::Tensor slope = gradients[0].reshape({-1, down.size(0)}), rows = x.view({-1, x.size(-1)});
    at::Tensor by_x, by_to_gate, by_to_up, by_down, by_gate;
    // What the last product read is made once more.
    if (ctx->needs_input_grad(3)) {
      by_gate = gated(gate, up).view({-1, width});
      by_down = times(slope.t(), by_gate, here);
    }
    if (ctx->needs_input_grad(0) || ctx->needs_input_grad(1) || ctx->needs_input_grad(2)) {
      if (!by_gate.defined()) by_gate = at::empty({slope.size(0), width}, slope.options());
      const at::Tensor by_up = times(slope, down, here);
      {
        RECORD_USER_SCOPE("gate_backward");
        const float *left = gate.const_data_ptr<float>(), *right = up.const_data_ptr<float>();
        float *to_right = by_up.mutable_data_ptr<float>(), *to_left = by_gate.mutable_data_ptr<float>();
        for_rows(by_gate, width, [=](int64_t row) {
          const int64_t at = row * width;
          gate_row_back(left + at, right + at, width, to_right + at, to_left + at);
        });
      }
      if (ctx->needs_input_grad(0)) {
        by_x = times(by_gate, to_gate, here);
        add_times(by_up, to_up, by_x, here);
        by_x = by_x.view_as(x);
      }
      if (ctx->needs_input_grad(1)) by_to_gate = times(by_gate.t(), rows, here);
      if (ctx->needs_input_grad(2)) by_to_up = times(by_up.t(), rows, here);
    }
    return {by_x, by_to_gate, by_to_up, by_down};
  }
};

// Whether it is the weight [outputs, inputs] of a product.
bool weight_of(const at::Tensor& tensor, int64_t outputs, int64_t inputs) {
  return plain(tensor) && tensor.dim() == 2 && tensor.size(0) == outputs && tensor.size(1) == inputs;
}

}  // namespace

extern "C" {

// (silu(x G^T) * x U^T) D^T of x [.., d], G and U [inner, d] and D [outputs, inner], where something learns of it.
at::Tensor* ds_gated_mlp(const at::Tensor* x, const at::Tensor* gate, const at::Tensor* up, const at::Tensor* down) {
  return made([&]() -> at::Tensor {
    if (!plain(*x) || x->dim() == 0 || x->numel() == 0 || down->dim() != 2 || down->numel() == 0) return {};
    const int64_t inner = down->size(1);
    if (!weight_of(*gate, inner, x->size(-1)) || !weight_of(*up, inner, x->size(-1)) || !plain(*down)) return {};
    if (!learns(*x) && !learns(*gate) && !learns(*up) && !learns(*down)) return {};
    return GatedMlp::apply(*x, *gate, *up, *down);
  });
}
}
