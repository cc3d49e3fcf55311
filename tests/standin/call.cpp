#include "call.h"
#include "standin.h"

#include <sstream>

#include <ATen/core/List.h>
#include <c10/core/CPUAllocator.h>

namespace standin {

namespace {

at::Tensor tensor_on(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

bool same_place(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.storage_offset() == b.storage_offset();
}

template <typename Elements, typename Change>
c10::IValue changed(const Elements& elements, Change change) {
  auto list = elements.copy();
  for (size_t i = 0; i < list.size(); ++i) list.set(i, change(list.get(i)));
  return list;
}

}  // namespace

at::Tensor Call::to_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), "the stand-in for a GPU knows no lazily conjugated tensors");
  for (const Seen& seen : seen_)
    if (seen.gpu.is_same(tensor)) return seen.host;
  const c10::Storage& gpu = tensor.storage();
  auto found = host_storages_.find(gpu.unsafeGetStorageImpl());
  if (found == host_storages_.end()) {
    c10::DataPtr data(gpu.mutable_data(), c10::Device(c10::kCPU));
    c10::Storage host(c10::Storage::use_byte_size_t(), gpu.nbytes(), std::move(data), c10::GetCPUAllocator(),
                      /*resizable=*/true);
    gpu_storages_.emplace(host.unsafeGetStorageImpl(), gpu);
    found = host_storages_.emplace(gpu.unsafeGetStorageImpl(), std::move(host)).first;
  }
  seen_.push_back({tensor, tensor_on(found->second, c10::DispatchKey::CPU, tensor)});
  return seen_.back().host;
}

c10::IValue Call::to_host(const c10::IValue& argument) {
  if (argument.isTensor()) return to_host(argument.toTensor());
  if (argument.isTensorList()) {
    return changed(argument.toTensorList(), [this](const at::Tensor& each) { return to_host(each); });
  }
  if (argument.isOptionalTensorList()) {
    return changed(argument.toOptionalTensorList(), [this](const std::optional<at::Tensor>& each) {
      return each.has_value() ? std::optional<at::Tensor>(to_host(*each)) : std::nullopt;
    });
  }
  if (argument.isDevice()) return c10::Device(c10::kCPU);
  return argument;
}

void Call::settle() {
  for (auto& [gpu_impl, host] : host_storages_) {
    const c10::Storage& gpu = gpu_storages_.at(host.unsafeGetStorageImpl());
    if (host.data() == gpu.data() && host.nbytes() == gpu.nbytes()) continue;
    // Its memory was replaced by a larger one, which all that share the storage see.
    c10::Storage larger(c10::Storage::use_byte_size_t(), host.nbytes(), host.set_data_ptr(c10::DataPtr(nullptr, c10::kCPU)),
                        c10::GetCPUAllocator(), /*resizable=*/false);
    c10::Storage adopted = adopt(larger, gpu.device().index());
    gpu.set_data_ptr_noswap(adopted.set_data_ptr(c10::DataPtr(nullptr, gpu.device())));
    gpu.set_nbytes(adopted.nbytes());
    adopted.set_nbytes(0);
  }
  for (Seen& seen : seen_) {
    auto* impl = seen.gpu.unsafeGetTensorImpl();
    auto stands_for = gpu_storages_.find(seen.host.storage().unsafeGetStorageImpl());
    if (stands_for == gpu_storages_.end()) {
      impl->set_storage_keep_dtype(storage_of(seen.host.storage()));
    } else if (stands_for->second.unsafeGetStorageImpl() != seen.gpu.storage().unsafeGetStorageImpl()) {
      impl->set_storage_keep_dtype(stands_for->second);
    }
    if (!same_place(seen.gpu, seen.host))
      impl->set_sizes_and_strides(seen.host.sizes(), seen.host.strides(), seen.host.storage_offset());
  }
}

c10::Storage Call::storage_of(const c10::Storage& host) {
  auto found = gpu_storages_.find(host.unsafeGetStorageImpl());
  if (found == gpu_storages_.end()) found = gpu_storages_.emplace(host.unsafeGetStorageImpl(), adopt(host, index_)).first;
  return found->second;
}

at::Tensor Call::to_gpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu()) return tensor;
  for (const Seen& seen : seen_)
    if (seen.host.is_same(tensor)) return seen.gpu;
  return tensor_on(storage_of(tensor.storage()), c10::DispatchKey::CUDA, tensor);
}

c10::IValue Call::to_gpu(const c10::IValue& result) {
  if (result.isTensor()) return to_gpu(result.toTensor());
  if (result.isTensorList()) {
    return changed(result.toTensorList(), [this](const at::Tensor& each) { return to_gpu(each); });
  }
  return result;
}

std::string described(const at::Tensor& tensor) {
  std::ostringstream text;
  text << c10::toString(tensor.scalar_type()) << ' ' << tensor.sizes();
  return text.str();
}

}  // namespace standin
