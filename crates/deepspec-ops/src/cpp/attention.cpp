// Attention of draft blocks after their anchors. Each block attends to keys of its context and to its own keys, but to
// no other block's. Each tile of queries attends to the context ranges (parts) that it sees, and each block attends to
// itself. The outputs of the parts are merged by their log-sum-exp. The backward of a part is its attention backward
// with the merged output and log-sum-exp, which is exact. Ring attention relies on this identity (Liu et al. 2023). No
// tensor of size all queries times all keys exists, in the forward or the backward.
//
// On the CPU libtorch's fused flash attention computes the parts; its backward uses at most one thread per KV head. On
// other devices matmuls compute the scores of one part at a time. See gpu_attention.cpp for the tiled version on GPUs.
#include "group.h"

#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A range of query rows and the range of keys that they attend to.
struct Part {
  int64_t first_row, rows, first_key, keys;
  Tensor mask;  // [1, 1, rows, keys], added to the scores; undefined if every key is visible
};

struct Plan : torch::CustomClassHolder {
  std::vector<Part> parts;
  Tensor block_mask;  // [1, 1, rows of a block, keys of a block]; undefined if every key is visible
  double scale;
};

std::optional<Tensor> given(const Tensor& mask) {
  return mask.defined() ? std::optional<Tensor>(mask) : std::nullopt;
}

std::optional<Tensor> given_if(const Tensor* tensor) { return tensor ? std::optional<Tensor>(*tensor) : std::nullopt; }

// a [.., R, D] times b [.., D, K] with equal leading sizes. The result is float32 and is never rounded to half
// precision, as in fused kernels.
Tensor product(const Tensor& a, const Tensor& b) {
  const auto kind = a.scalar_type(), wide = at::toOpMathType(kind);
  if (kind == wide) return at::matmul(a, b);
  std::vector<int64_t> shape = a.sizes().vec();
  shape.back() = b.size(-1);
  return at::bmm(a.flatten(0, -3), b.flatten(0, -3), wide).view(shape);
}

// Float32 scores [N, G, R, K] of one part: queries [N, G, R, D] over keys [N, G, K, D].
Tensor scores(const Tensor& q, const Tensor& k, const Tensor& mask, double scale) {
  Tensor all = product(q, k.transpose(-2, -1)).mul_(scale);
  return mask.defined() ? all.add_(mask) : all;
}

// Returns the output [N, G, R, D] of a part and the log-sum-exp [N, G, R] of its scores.
std::tuple<Tensor, Tensor> attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask, double scale) {
  if (q.device().is_cpu())
    return at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, false, given(mask), scale);
  Tensor all = scores(q, k, mask, scale);
  Tensor lse = at::logsumexp(all, -1);
  return {at::matmul(all.sub_(lse.unsqueeze(-1)).exp_().to(q.scalar_type()), v), lse};
}

// Returns the gradients of a part's queries, keys and values. `out` and `lse` are the merged ones of all parts.
std::tuple<Tensor, Tensor, Tensor> attend_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                                   const Tensor& out, const Tensor& lse, const Tensor& mask, double scale) {
  if (q.device().is_cpu())
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, false, given(mask), scale);
  const auto kind = q.scalar_type(), wide = at::toOpMathType(kind);
  Tensor weights = scores(q, k, mask, scale).sub_(lse.unsqueeze(-1)).exp_();
  Tensor inner = (grad.to(wide) * out.to(wide)).sum(-1, /*keepdim=*/true);
  Tensor slopes = product(grad, v.transpose(-2, -1)).sub_(inner).mul_(weights).mul_(scale).to(kind);
  Tensor values = at::matmul(weights.to(kind).transpose(-2, -1), grad);
  return {at::matmul(slopes, k), at::matmul(slopes.transpose(-2, -1), q), values};
}

// Merges the output and log-sum-exp of a part into `out` and `lse`, in place.
void merge(Tensor out, Tensor lse, const std::tuple<Tensor, Tensor>& part) {
  const auto& [part_out, part_lse] = part;
  const Tensor both = at::logaddexp(lse, part_lse.to(lse.scalar_type()));
  out.mul_((lse - both).exp_().unsqueeze(-1)).addcmul_(part_out.to(out.scalar_type()), (part_lse - both).exp_().unsqueeze(-1));
  lse.copy_(both);
}

// The query rows of a part, and below its keys, in a tensor [N, G, rows, ..].
Tensor rows_of(const Tensor& tensor, const Part& part) { return tensor.narrow(2, part.first_row, part.rows); }
Tensor keys_of(const Tensor& tensor, const Part& part) { return tensor.narrow(2, part.first_key, part.keys); }

struct Attention : torch::autograd::Function<Attention> {
  // q [G, A, r, D], k and v [G, T, D], own_k and own_v [G, A, B, D]; returns [G, A, r, D]. `sinks` [G, 1, r] are further
  // scores of each row without a value, or none: a part with this log-sum-exp and an output of zeros.
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& own_k,
                        const Tensor& own_v, const std::optional<Tensor>& sinks, const c10::intrusive_ptr<Plan>& plan) {
    const int64_t groups = q.size(0), rows = q.size(1) * q.size(2);
    const auto wide = q.options().dtype(at::toOpMathType(q.scalar_type()));
    const Tensor queries = q.reshape({1, groups, rows, q.size(3)}), keys = k.unsqueeze(0), values = v.unsqueeze(0);
    Tensor out = at::zeros(queries.sizes(), wide);
    Tensor lse = at::full({1, groups, rows}, -std::numeric_limits<double>::infinity(), wide);
    if (sinks) lse.view({groups, q.size(1), q.size(2)}).copy_(sinks->expand({groups, q.size(1), q.size(2)}));
    for (const Part& part : plan->parts) {
      auto seen = attend(rows_of(queries, part), keys_of(keys, part), keys_of(values, part), part.mask, plan->scale);
      merge(rows_of(out, part), rows_of(lse, part), seen);
    }
    const auto by_block = [&](const Tensor& of_rows) { return of_rows.view_as(q).transpose(0, 1); };
    const auto own = attend(q.transpose(0, 1), own_k.transpose(0, 1), own_v.transpose(0, 1), plan->block_mask, plan->scale);
    merge(by_block(out), lse.view({groups, q.size(1), q.size(2)}).transpose(0, 1), own);
    out = out.view_as(q).to(q.scalar_type());
    ctx->save_for_backward({q, k, v, own_k, own_v, out, lse, sinks.value_or(Tensor())});
    ctx->saved_data["plan"] = c10::IValue::make_capsule(plan);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &own_k = saved[3], &own_v = saved[4], &out = saved[5], &lse = saved[6],
                 &sinks = saved[7];
    const auto plan = c10::static_intrusive_pointer_cast<Plan>(ctx->saved_data["plan"].toCapsule());
    const int64_t groups = q.size(0), rows = q.size(1) * q.size(2);
    const auto flat = [&](const Tensor& of_blocks) { return of_blocks.reshape({1, groups, rows, q.size(3)}); };
    const Tensor queries = flat(q), gradient = flat(gradients[0]), merged = flat(out), keys = k.unsqueeze(0), values = v.unsqueeze(0);
    const auto across = [](const Tensor& tensor) { return tensor.transpose(0, 1); };
    const Tensor own_lse = lse.view({groups, q.size(1), q.size(2)});
    const auto [own_dq, own_dk, own_dv] =
        attend_backward(across(gradients[0]), across(q), across(own_k), across(own_v), across(out),
                        across(own_lse).contiguous(), plan->block_mask, plan->scale);
    // Gradients are summed over many parts, so half precision dtypes are summed in float32.
    const auto wide = q.options().dtype(at::toOpMathType(q.scalar_type()));
    Tensor dq = at::empty(q.sizes(), wide).copy_(across(own_dq)).view(queries.sizes());
    Tensor dk = at::zeros(keys.sizes(), wide), dv = at::zeros(values.sizes(), wide);
    for (const Part& part : plan->parts) {
      const auto [part_dq, part_dk, part_dv] = attend_backward(
          rows_of(gradient, part), rows_of(queries, part), keys_of(keys, part), keys_of(values, part), rows_of(merged, part),
          rows_of(lse, part).contiguous(), part.mask, plan->scale);
      rows_of(dq, part).add_(part_dq);
      keys_of(dk, part).add_(part_dk);
      keys_of(dv, part).add_(part_dv);
    }
    const auto as = [](const Tensor& sum, const Tensor& like) { return sum.view(like.sizes()).to(like.scalar_type()); };
    // A sink with probability p lowers the output by p times itself.
    Tensor by_sinks;
    if (sinks.defined()) {
      const Tensor inner = (gradients[0].to(wide.dtype()) * out.to(wide.dtype())).sum(-1);
      by_sinks = (sinks.to(wide.dtype()) - own_lse).exp_().mul_(inner).sum(1, /*keepdim=*/true).neg_().to(sinks.scalar_type());
    }
    return {as(dq, q), as(dk, k), as(dv, v), across(own_dk), across(own_dv), by_sinks, Tensor()};
  }
};

}  // namespace

extern "C" {

struct AttentionPart {
  int64_t first_row, rows, first_key, keys;
  const Tensor* mask;  // or null
};

// See `Attention`; the result is a new tensor in `*out`.
char* ds_block_attention(const Tensor* q, const Tensor* k, const Tensor* v, const Tensor* own_k, const Tensor* own_v,
                         const AttentionPart* parts, size_t count, const Tensor* block_mask, const Tensor* sinks, double scale,
                         Tensor** out) {
  return caught([&] {
    // The kernels do not check this.
    for (const Tensor* each : {q, k, v, own_k, own_v}) TORCH_CHECK(each->stride(-1) == 1, "values of a head do not lie side by side");
    auto plan = c10::make_intrusive<Plan>();
    for (size_t i = 0; i < count; ++i) {
      const AttentionPart& part = parts[i];
      plan->parts.push_back({part.first_row, part.rows, part.first_key, part.keys, part.mask ? *part.mask : Tensor()});
    }
    if (block_mask) plan->block_mask = *block_mask;
    plan->scale = scale;
    *out = new Tensor(Attention::apply(*q, *k, *v, *own_k, *own_v, given_if(sinks), plan));
  });
}
}
