// One operator that was asked of a GPU and runs on the CPU.
#pragma once

#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace standin {

// The host's views of a GPU's tensors for one call, and the way back: a view shares the memory of what it shows, with the same
// sizes and strides, so that an operator does on it what it would do on a tensor of the CPU.
class Call {
 public:
  // Results are made on GPU `index`.
  explicit Call(c10::DeviceIndex index) : index_(index) {}

  // What the CPU's kernel takes in the place of an argument: views of tensors, the CPU in the place of GPUs.
  c10::IValue to_host(const c10::IValue& argument);
  at::Tensor to_host(const at::Tensor& tensor);

  // Arguments that were given other memory or sizes (`out`, `resize_`) get them on the GPU too.
  void settle();

  // What the caller gets in the place of a result: the argument itself where that was returned, another view of an argument's
  // memory where it is one, else memory of the GPU.
  c10::IValue to_gpu(const c10::IValue& result);
  at::Tensor to_gpu(const at::Tensor& tensor);

 private:
  struct Seen {
    at::Tensor gpu, host;
  };

  c10::Storage storage_of(const c10::Storage& host);

  c10::DeviceIndex index_;
  std::vector<Seen> seen_;
  // Storages of the host and those of the GPU that they stand for.
  std::unordered_map<c10::StorageImpl*, c10::Storage> gpu_storages_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> host_storages_;
};

// "Long [3, 4]".
std::string described(const at::Tensor& tensor);

}  // namespace standin
