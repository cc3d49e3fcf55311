// Products of float32 matrices on oneDNN's kernels, which libtorch leaves to the BLAS otherwise.
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

namespace at::native {
// result = alpha * a b + beta * result. Of libtorch's library, though not of its headers; not in builds without oneDNN.
__attribute__((weak)) void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& result, float beta, float alpha);
}  // namespace at::native

extern "C" {

// out [M, N] = a [M, K] b [K, N], or added to it. Whether oneDNN did it; else nothing was done.
bool ds_onednn_product(const at::Tensor* out, const at::Tensor* a, const at::Tensor* b, bool add) {
  if (at::native::mkldnn_matmul == nullptr) return false;
  try {
    const c10::NoGradGuard guard;
    at::native::mkldnn_matmul(*a, *b, *out, add ? 1.0f : 0.0f, 1.0f);
    return true;
  } catch (...) {
    return false;
  }
}
}
