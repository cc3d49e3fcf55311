// Losses of rows of bfloat16 logits on a GPU: checks the arguments and launches the kernels of src/cuda/losses.cu.
#include "gpu.h"

#include <algorithm>
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace {

// Must match the constants in losses.cu.
constexpr int64_t kFound = 9, kFactors = 3;

struct LogitRows {
  void *base, *bias;
  const void* target;
  const int64_t *source, *labels;
  // The kernel's 64-bit type is `long long`.
  long long vocab, base_line, bias_line, target_line;
  float cap;
  int by_eight;
};

// Whether `tensor` is bfloat16 [rows, vocab] on the device of `like`, with contiguous rows.
bool half_rows(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.device() == like.device() && tensor.scalar_type() == at::kBFloat16 && tensor.dim() == 2 && tensor.size(1) == like.size(1) &&
         (tensor.stride(1) == 1 || tensor.size(1) <= 1);
}

bool is_by_eight(const at::Tensor& rows) {
  return reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 16 == 0 && rows.stride(0) % 8 == 0 && rows.size(1) % 8 == 0;
}

// Whether `of` holds one int64 per row of `like`, on the same device.
bool numbers(const at::Tensor& of, const at::Tensor& like) {
  return of.device() == like.device() && of.scalar_type() == at::kLong && of.is_contiguous() && of.numel() == like.size(0);
}

// Fills in the kernels' argument; returns false if the kernels do not support these tensors.
bool rows_of(const at::Tensor& base, const at::Tensor* bias, const at::Tensor& target, const at::Tensor* source, const at::Tensor& labels, double cap,
             LogitRows& rows) {
  if (!gpu::has_kernels(base, gpu::Text::kLosses) || base.numel() == 0 || !half_rows(base, base) || !half_rows(target, base)) return false;
  if (bias && (!half_rows(*bias, base) || bias->size(0) != base.size(0))) return false;
  if (!numbers(labels, base) || !(source ? numbers(*source, base) : target.size(0) == base.size(0))) return false;
  rows = {base.data_ptr(),
          bias ? bias->data_ptr() : nullptr,
          target.const_data_ptr(),
          source ? source->const_data_ptr<int64_t>() : nullptr,
          labels.const_data_ptr<int64_t>(),
          base.size(1),
          base.stride(0),
          bias ? bias->stride(0) : 0,
          target.stride(0),
          static_cast<float>(cap),
          is_by_eight(base) && is_by_eight(target) && (!bias || is_by_eight(*bias))};
  return true;
}

}  // namespace

extern "C" {

// Compares the drafter's logits `base` [n, V] with the target's logits. Both are soft-capped if `cap` is not 0; `bias`,
// if given, is added to `base`. With `source`, row i is compared with target row source[i]. Returns `Found` [n, 9] in
// float32.
at::Tensor* ds_measure_logits(const at::Tensor* base, const at::Tensor* bias, const at::Tensor* target, const at::Tensor* source,
                              const at::Tensor* labels, double cap) {
  return made([&]() -> at::Tensor {
    LogitRows rows;
    if (!rows_of(*base, bias, *target, source, *labels, cap, rows)) return {};
    RECORD_USER_SCOPE("measure_logits");
    at::Tensor found = at::empty({base->size(0), kFound}, base->options().dtype(at::kFloat));
    const gpu::Shape shape{{static_cast<unsigned>(base->size(0)), 1, 1}, 512};
    gpu::run(gpu::Text::kLosses, "measure_logits", shape, *base, rows, found.mutable_data_ptr<float>());
    return found;
  });
}

// Overwrites the measured logits with their gradients. The bias is overwritten if there is one, and the base if there
// is no bias or there is a cap.
char* ds_slope_logits(const at::Tensor* base, const at::Tensor* bias, const at::Tensor* target, const at::Tensor* source, const at::Tensor* labels,
                     double cap, const at::Tensor* found, const at::Tensor* factors) {
  return caught([&] {
    LogitRows rows;
    const auto fits = [&](const at::Tensor& of, int64_t width) {
      return of.device() == base->device() && of.scalar_type() == at::kFloat && of.is_contiguous() && of.numel() == base->size(0) * width;
    };
    TORCH_CHECK(rows_of(*base, bias, *target, source, *labels, cap, rows) && fits(*found, kFound) && fits(*factors, kFactors),
                "rows, or what was found of them, do not fit");
    RECORD_USER_SCOPE("slope_logits");
    // Tokens per block: a multiple of what its threads process in one iteration.
    const long long piece = 16384;
    const auto pieces = static_cast<unsigned>((rows.vocab + piece - 1) / piece);
    const gpu::Shape shape{{static_cast<unsigned>(base->size(0)), pieces, 1}, 256};
    gpu::run(gpu::Text::kLosses, "slope_logits", shape, *base, rows, found->const_data_ptr<float>(), factors->const_data_ptr<float>(), piece);
  });
}
}
