// A GPU that is none: what becomes of these files is loaded in the place of libtorch's CUDA part on machines without a GPU.
// Tensors of "cuda:N" lie in host memory and operators run on libtorch's CPU kernels, but what a GPU refuses is refused in its
// words, and what costs time on a GPU is counted: transfers, and whatever makes the host wait.
#pragma once

#include <cstddef>
#include <string>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

namespace standin {

constexpr c10::DeviceType kGpu = c10::DeviceType::CUDA;

// devices.cpp

// GPUs of this process: DEEPSPEC_STANDIN_DEVICES, else 1, less what CUDA_VISIBLE_DEVICES hides.
c10::DeviceIndex device_count();

// The calling thread's current GPU.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);

// Makes a GPU the current one for as long as this lives.
class OnDevice {
 public:
  explicit OnDevice(c10::DeviceIndex index) : before_(current_device()) { set_current_device(index); }
  ~OnDevice() { set_current_device(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  c10::DeviceIndex before_;
};

// memory.cpp

// Memory of the current GPU, DEEPSPEC_STANDIN_MEMORY bytes of it on each (else 80 GiB). Who asks how much is free is told
// DEEPSPEC_STANDIN_FREE instead of the truth where that is set.
c10::Allocator* memory();

// Host memory that is marked as pinned.
c10::Allocator* pinned_memory();
bool is_pinned(const void* data);

// A host storage as one of GPU `index`, whose memory it takes from then on; throws if that has too little.
c10::Storage adopt(const c10::Storage& host, c10::DeviceIndex index);

// What the report says of a GPU's memory.
struct MemoryUse {
  size_t live = 0, peak = 0, allocations = 0, refused = 0;
};
MemoryUse memory_use(c10::DeviceIndex index);

// report.cpp: everything is counted by operator and, for transfers, by what was moved ("Long [3, 4]"). The file that
// DEEPSPEC_STANDIN_REPORT names is written as JSON when the process ends; `%p` in the name stands for the process's number.

// An operator ran on a GPU.
void ran(const std::string& name);
// Host to GPU. A copy that is not asked to be asynchronous waits until it is done.
void uploaded(const std::string& name, const std::string& what, size_t bytes, bool blocking);
// GPU to host; the host waits for it.
void downloaded(const std::string& name, const std::string& what, size_t bytes);
// GPU to GPU.
void moved(const std::string& name, const std::string& what, size_t bytes);
// The host waited for a GPU other than by a copy.
void waited(const std::string& name);

}  // namespace standin
