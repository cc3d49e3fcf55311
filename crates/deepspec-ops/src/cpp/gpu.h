// Our own kernels on NVIDIA's GPUs. Their text (src/cuda) is compiled for the GPU at hand when one of them is first asked for, by the compiler that libtorch
// brings along; nothing of CUDA is needed to build, and what is built runs without it.
#pragma once

#include <array>
#include <cstdint>

#include <ATen/core/Tensor.h>

namespace gpu {

// Texts of kernels, each a module of its own.
enum class Text { kLosses, kAttention, kRows, kDecode, kCount };

// How many blocks, threads of each, and bytes of shared memory that these ask for when they are launched.
struct Shape {
  std::array<unsigned, 3> blocks;
  unsigned threads, shared = 0;
  // Whether blocks may begin before the kernel in front is done: for kernels that wait for it by themselves. Where the GPU cannot, they do not.
  bool overlaps = false;
};

// Whether there are these kernels for the device of `tensor`: an NVIDIA GPU with what compiles for it. Where they cannot be compiled that is said once.
bool has_kernels(const at::Tensor& tensor, Text text);

// Bytes of shared memory that a block on the device of `on` can have.
unsigned shared_memory(const at::Tensor& on);

// Whether the GPU of this index computes in bfloat16 by itself, as all do since compute capability 8; true where the driver does not say.
bool has_bfloat16(int index);

// Runs a kernel on the present stream of `on`'s device, with pointers to its arguments. Throws what the driver says.
void launch(Text text, const char* name, const Shape& shape, const at::Tensor& on, void** arguments);

// The same with the arguments themselves, which must be of the kernel's own types.
template <typename... Arguments>
void run(Text text, const char* name, const Shape& shape, const at::Tensor& on, Arguments... arguments) {
  void* pointers[] = {&arguments...};
  launch(text, name, shape, on, pointers);
}

}  // namespace gpu
