// This program's own kernels for NVIDIA GPUs. Their text (src/cuda) is compiled for the GPU at hand on first use, by
// the NVRTC that libtorch ships. The build needs nothing of CUDA, and the built program also runs without it.
#pragma once

#include <array>
#include <cstdint>

#include <ATen/core/Tensor.h>

namespace gpu {

// Kernel sources; each is compiled into a module of its own.
enum class Text { kLosses, kAttention, kRows, kDecode, kCount };

// A launch configuration: grid size, threads per block, and bytes of dynamic shared memory per block.
struct Shape {
  std::array<unsigned, 3> blocks;
  unsigned threads, shared = 0;
  // Whether blocks may start before the previous kernel of the stream has finished; the kernel must then wait for it
  // itself. GPUs without support ignore this.
  bool overlaps = false;
};

// Whether the kernels of this text run on the device of `tensor`: an NVIDIA GPU for which they compile. A failure to
// compile is reported once.
bool has_kernels(const at::Tensor& tensor, Text text);

// Bytes of shared memory that a block on the device of `on` can use; 0 if unknown.
unsigned shared_memory(const at::Tensor& on);

// Whether the GPU of this index supports bfloat16 in hardware, as all do from compute capability 8 on; true without a
// driver.
bool has_bfloat16(int index);

// Launches a kernel on the current stream of `on`'s device, with pointers to its arguments. Throws the driver's error.
void launch(Text text, const char* name, const Shape& shape, const at::Tensor& on, void** arguments);

// As `launch`, but takes the arguments themselves, which must have the kernel's own types.
template <typename... Arguments>
void run(Text text, const char* name, const Shape& shape, const at::Tensor& on, Arguments... arguments) {
  void* pointers[] = {&arguments...};
  launch(text, name, shape, on, pointers);
}

}  // namespace gpu
