// Operators that libtorch makes of six to nine others, in one pass over float32 rows on the CPU. A row's result does not depend on
// the rows beside it.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

namespace {

// As many sums side by side, so that their order is the same on every machine.
constexpr int64_t kLanes = 16;
// Values that are worth a thread, as libtorch's own operators have it.
constexpr int64_t kGrain = 32768;

bool plain(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous() &&
      !(c10::GradMode::is_enabled() && tensor.requires_grad());
}

// Calls `each(task)` for all of `count` tasks, on several threads where there are some and more tasks than `grain`.
template <typename Each>
void for_tasks(int64_t count, int64_t grain, Each each) {
  if (count <= grain || at::get_num_threads() == 1) {
    for (int64_t task = 0; task < count; ++task) each(task);
    return;
  }
  // libtorch's iterator has its threads; it goes over a byte for each task.
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

float sum_of_squares(const float* x, int64_t width) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += x[i + lane] * x[i + lane];
  for (; i < width; ++i) lanes[0] += x[i] * x[i];
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// A new tensor, or null where `work` says that it does not apply, or fails.
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

extern "C" {

// x / rms(x) * weight over the last dimension.
at::Tensor* ds_rms_norm(const at::Tensor* x, const at::Tensor* weight, double eps) {
  return made([&]() -> at::Tensor {
    const int64_t width = weight->numel();
    if (!plain(*x) || !plain(*weight) || width == 0 || x->dim() == 0 || x->size(-1) != width) return {};
    RECORD_USER_SCOPE("rms_norm");
    at::Tensor out = at::empty_like(*x);
    const float *from = x->const_data_ptr<float>(), *scale = weight->const_data_ptr<float>();
    float* to = out.mutable_data_ptr<float>();
    for_rows(out, width, [=](int64_t row) {
      const float* in = from + row * width;
      const float mean = sum_of_squares(in, width) / static_cast<float>(width);
      const float inverse = 1.0f / std::sqrt(mean + static_cast<float>(eps));
      for (int64_t i = 0; i < width; ++i) to[row * width + i] = in[i] * inverse * scale[i];
    });
    return out;
  });
}

// Turns the planes (i, D/2 + i) of x [N, heads, D]; cosines and sines are [N, 1, D/2].
at::Tensor* ds_rotate(const at::Tensor* x, const at::Tensor* cosines, const at::Tensor* sines) {
  return made([&]() -> at::Tensor {
    if (!plain(*x) || !plain(*cosines) || !plain(*sines) || x->dim() != 3 || x->numel() == 0) return {};
    const int64_t heads = x->size(1), width = x->size(2), half = width / 2;
    const int64_t needed = x->size(0) * half;
    if (width % 2 != 0 || cosines->numel() != needed || sines->numel() != needed) return {};
    RECORD_USER_SCOPE("rotate");
    at::Tensor out = at::empty_like(*x);
    const float *from = x->const_data_ptr<float>(), *cos = cosines->const_data_ptr<float>(),
                *sin = sines->const_data_ptr<float>();
    float* to = out.mutable_data_ptr<float>();
    for_rows(out, width, [=](int64_t row) {
      const float *a = from + row * width, *b = a + half;
      const float *c = cos + row / heads * half, *s = sin + row / heads * half;
      float *first = to + row * width, *second = first + half;
      for (int64_t i = 0; i < half; ++i) {
        first[i] = a[i] * c[i] - b[i] * s[i];
        second[i] = b[i] * c[i] + a[i] * s[i];
      }
    });
    return out;
  });
}
}
