// Shared by the float32 operators on the CPU: which tensors they support, how they use threads, and how they return
// results.
#pragma once

#include <algorithm>
#include <cstdint>

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

namespace {

// Values that are worth a thread, as in libtorch's own operators.
constexpr int64_t kGrain = 32768;
// Multiply-adds that are worth a thread.
constexpr int64_t kWork = 1 << 20;

// Whether these operators support the tensor: contiguous float32 on the CPU.
inline bool plain(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous();
}

// Whether autograd records operations on the tensor.
inline bool learns(const at::Tensor& tensor) { return c10::GradMode::is_enabled() && tensor.requires_grad(); }

// Calls `each(task)` for all `count` tasks, on several threads if there are any and there are more tasks than `grain`.
template <typename Each>
void for_tasks(int64_t count, int64_t grain, Each each) {
  if (count <= grain || at::get_num_threads() == 1) {
    for (int64_t task = 0; task < count; ++task) each(task);
    return;
  }
  // libtorch's TensorIterator provides the threads; it iterates over one byte per task.
  at::Tensor tasks = at::empty({count}, at::kByte);
  const char* start = static_cast<const char*>(tasks.data_ptr());
  auto iterator = at::TensorIteratorConfig()
                      .set_check_mem_overlap(false)
                      .check_all_same_dtype(false)
                      .resize_outputs(false)
                      .add_owned_output(tasks)
                      .build();
  iterator.for_each(
      [&](char** data, const int64_t* strides, int64_t inner, int64_t outer) {
        for (int64_t j = 0; j < outer; ++j)
          for (int64_t i = 0; i < inner; ++i) each(data[0] + i * strides[0] + j * strides[1] - start);
      },
      grain);
}

// Calls `each(row)` for all rows of `out [.., width]`.
template <typename Each>
void for_rows(const at::Tensor& out, int64_t width, Each each) {
  for_tasks(out.numel() / width, std::max<int64_t>(1, kGrain / width), each);
}

// Returns a new tensor, or null if `work` throws or returns an undefined tensor, which means that it does not apply.
template <typename Work>
at::Tensor* made(Work work) {
  try {
    at::Tensor out = work();
    return out.defined() ? new at::Tensor(std::move(out)) : nullptr;
  } catch (...) {
    return nullptr;
  }
}

}  // namespace
