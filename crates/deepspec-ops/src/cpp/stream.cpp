// GPU streams besides the default stream, and events between streams, through libtorch's interface that needs no CUDA
// headers.
#include "group.h"

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace {

c10::impl::VirtualGuardImpl gpus() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA);
}

c10::Device device_of(int index) {
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)};
}

// Event operations end by making the previously current GPU current again. In a new thread that is the first GPU, and
// the driver would create a context on it even if it is unused.
using OnGpu = c10::DeviceGuard;

}  // namespace

extern "C" {

char* ds_side_stream(int index, int64_t* id) {
  return caught([&] { *id = gpus().getStreamFromGlobalPool(device_of(index)).id(); });
}

// Makes a stream this thread's current one; `*before` is the previous one.
char* ds_enter_stream(int index, int64_t id, int64_t* before) {
  return caught([&] { *before = gpus().exchangeStream(c10::Stream(c10::Stream::UNSAFE, device_of(index), id)).id(); });
}

// Records an event after all work of this thread's current stream so far.
char* ds_event_here(int index, c10::Event** out) {
  return caught([&] {
    const OnGpu on(device_of(index));
    auto event = std::make_unique<c10::Event>(c10::DeviceType::CUDA);
    event->record(gpus().getStream(device_of(index)));
    *out = event.release();
  });
}

// This thread's current stream on a GPU waits for the event.
char* ds_event_block(c10::Event* event, int index) {
  return caught([&] {
    const OnGpu on(device_of(index));
    event->block(gpus().getStream(device_of(index)));
  });
}

// This thread's current stream on each tensor's GPU waits for the event. The allocator does not reuse the tensors'
// memory before that stream is done with it.
char* ds_event_hold(c10::Event* event, const at::Tensor* const* tensors, size_t count) {
  return caught([&] {
    for (size_t i = 0; i < count; ++i) {
      const at::Tensor& tensor = *tensors[i];
      if (!tensor.is_cuda()) continue;
      const OnGpu on(tensor.device());
      const c10::Stream stream = gpus().getStream(tensor.device());
      event->block(stream);
      gpus().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }
  });
}

// Blocks the host until the event has happened.
char* ds_event_wait(c10::Event* event) {
  return caught([&] { event->synchronize(); });
}

void ds_event_free(c10::Event* event) {
  const OnGpu on(event->device());
  delete event;
}

// Allocates pinned host memory for values of the dtype of `like`.
char* ds_pinned(const int64_t* size, size_t dims, const at::Tensor* like, at::Tensor** out) {
  return caught([&] {
    const auto options = at::TensorOptions().dtype(like->dtype()).pinned_memory(true);
    *out = new at::Tensor(at::empty(at::IntArrayRef(size, dims), options));
  });
}
}
