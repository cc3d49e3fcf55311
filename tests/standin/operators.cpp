// The operators of a GPU: all by the CPU's kernels, but for those that make tensors or carry them between devices.
#include "call.h"
#include "standin.h"

#include <array>
#include <string_view>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DefaultDtype.h>
#include <torch/library.h>

namespace standin {

namespace {

constexpr c10::DispatchKeySet kGpuKeys(c10::DispatchKey::CUDA);

template <size_t N>
bool among(const std::array<std::string_view, N>& names, std::string_view name) {
  for (std::string_view each : names)
    if (each == name) return true;
  return false;
}

// Operators whose result's size or error depends on values, which the host must wait for on a GPU.
constexpr std::array<std::string_view, 17> kWaits{
    "aten::nonzero",     "aten::masked_select", "aten::unique_dim",  "aten::_unique",         "aten::_unique2",
    "aten::equal",       "aten::is_nonzero",    "aten::multinomial", "aten::bincount",        "aten::unique_consecutive",
    "aten::histc",       "aten::_linalg_svd",   "aten::linalg_qr",   "aten::linalg_inv_ex",   "aten::_linalg_eigh",
    "aten::_linalg_det", "aten::_linalg_slogdet"};

// Operators that take no host tensor even where it is a scalar; others pass a host's scalar to their kernel by value.
constexpr std::array<std::string_view, 12> kStrict{
    "aten::_fused_adamw_", "aten::_fused_adam_", "aten::index_select",   "aten::gather",     "aten::scatter",
    "aten::scatter_add",   "aten::index_add",    "aten::index_copy",     "aten::index_fill", "aten::embedding_dense_backward",
    "aten::take",          "aten::searchsorted"};

// An argument that is a tensor, or one of several.
struct Operand {
  const at::Tensor& tensor;
  const std::string& argument;
};

void refuse(const std::string& name, const Operand& one, c10::Device other) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", other, " and ",
              one.tensor.device(), "! (argument ", one.argument, " of ", name, ")");
}

// The GPU that an operator's tensors lie on; -1 if none does. Throws if they lie on several devices.
c10::DeviceIndex common_device(const std::string& name, const std::vector<Operand>& operands) {
  const Operand* first = nullptr;
  for (const Operand& each : operands)
    if (each.tensor.is_cuda()) {
      first = &each;
      break;
    }
  if (first == nullptr) return -1;
  // `scatter_` and `scatter.value_out` are `scatter`.
  const bool strict = among(kStrict, std::string_view(name).substr(0, name.find_first_of('.'))) ||
      (name.find("_.") != std::string::npos && among(kStrict, std::string_view(name).substr(0, name.find("_."))));
  for (const Operand& each : operands) {
    const bool by_value = each.tensor.is_cpu() && each.tensor.dim() == 0 && !strict;
    if (each.tensor.device() != first->tensor.device() && !by_value) refuse(name, each, first->tensor.device());
  }
  return first->tensor.device().index();
}

// A list of indices may lie on the host. `index` has uploaded it already, or counted its masks, when it comes here; the kernel
// behind `index_put_` does both itself.
void check_indices(const std::string& name, const at::Tensor& indexed, const c10::List<std::optional<at::Tensor>>& indices,
                   const at::Tensor* value) {
  const bool puts = name.compare(0, 16, "aten::_index_put") == 0;
  bool mask = false;
  for (size_t i = 0; i < indices.size(); ++i) {
    const std::optional<at::Tensor> index = indices.get(i);
    if (!index.has_value() || !index->defined()) continue;
    TORCH_CHECK(index->is_cpu() || index->device() == indexed.device(),
                "indices should be either on cpu or on the same device as the indexed tensor (", indexed.device(), ")");
    if (puts && indexed.is_cuda() && index->is_cpu()) uploaded(name, described(*index), index->nbytes(), true);
    mask |= index->is_cuda() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
  }
  if (!puts || !indexed.is_cuda()) return;
  // One value of the host goes everywhere that a mask says, without a count and without an upload.
  if (mask && value->is_cpu() && value->numel() == 1) return;
  if (value->is_cpu()) uploaded(name, described(*value), value->nbytes(), true);
  if (mask) waited(name);
}

bool host_waits(const std::string& name, const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  if (among(kWaits, std::string_view(name).substr(0, name.find_first_of('.')))) return true;
  if (name != "aten::repeat_interleave.Tensor") return false;
  const auto size = schema.argumentIndexWithName("output_size");
  return !size.has_value() || arguments[*size].isNone();
}

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string name = c10::toString(op.operator_name());
  const size_t first = stack->size() - schema.arguments().size();
  const std::vector<c10::IValue> arguments(stack->begin() + static_cast<long>(first), stack->end());

  std::vector<std::pair<size_t, at::Tensor>> tensors;
  std::optional<c10::Device> asked;
  std::optional<size_t> indices;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& argument = arguments[i];
    if (argument.isTensor() && argument.toTensor().defined()) tensors.emplace_back(i, argument.toTensor());
    if (argument.isTensorList())
      for (const at::Tensor& each : argument.toTensorVector())
        if (each.defined()) tensors.emplace_back(i, each);
    if (argument.isOptionalTensorList()) indices = i;
    if (argument.isDevice()) asked = argument.toDevice();
  }
  std::vector<Operand> operands;
  for (const auto& [i, tensor] : tensors) operands.push_back({tensor, schema.arguments()[i].name()});
  if (indices.has_value() && !operands.empty()) {
    // The values to put stand last, and so does the result of `index`.
    check_indices(name, operands.front().tensor, arguments[*indices].toOptionalTensorList(), &operands.back().tensor);
  }
  const c10::DeviceIndex common = common_device(name, operands);
  ran(name);
  if (host_waits(name, schema, arguments)) waited(name);

  const bool to_gpu = asked.has_value() ? asked->is_cuda() : true;
  c10::DeviceIndex index = common;
  if (asked.has_value() && asked->is_cuda() && asked->has_index()) index = asked->index();
  Call call(index < 0 ? current_device() : index);
  for (size_t i = 0; i < arguments.size(); ++i) (*stack)[first + i] = call.to_host(arguments[i]);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.settle();
  if (!to_gpu) return;
  for (size_t i = first; i < stack->size(); ++i) (*stack)[i] = call.to_gpu((*stack)[i]);
}

c10::DeviceIndex placed(const std::optional<c10::Device>& device) {
  return device.has_value() && device->has_index() ? device->index() : current_device();
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> kind, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(placed(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), memory(), kGpuKeys, c10::dtype_or_default(kind), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef strides, std::optional<at::ScalarType> kind,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(placed(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides), memory(), kGpuKeys,
                                           c10::dtype_or_default(kind));
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const std::string name = "aten::copy_";
  ran(name);
  if (from.numel() > 0) {
    if (to.is_cuda() && !from.is_cuda()) uploaded(name, described(from), from.nbytes(), !non_blocking);
    if (!to.is_cuda() && from.is_cuda()) downloaded(name, described(from), from.nbytes());
    if (to.is_cuda() && from.is_cuda() && to.device() != from.device()) moved(name, described(from), from.nbytes());
  }
  at::AutoDispatchBelowADInplaceOrView below;
  Call call(to.is_cuda() ? to.device().index() : from.device().index());
  at::Tensor host = call.to_host(to);
  host.copy_(call.to_host(from));
  return to;
}

at::Scalar local_scalar(const at::Tensor& self) {
  const std::string name = "aten::_local_scalar_dense";
  ran(name);
  downloaded(name, described(self), self.nbytes());
  at::AutoDispatchBelowADInplaceOrView below;
  return at::_local_scalar_dense(Call(self.device().index()).to_host(self));
}

// The CPU has no kernel for it.
at::Tensor bmm_wide(const at::Tensor& a, const at::Tensor& b, at::ScalarType kind) { return a.to(kind).bmm(b.to(kind)); }

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides),
                              offset.guard_int(__FILE__, __LINE__));
  return self;
}

}  // namespace

}  // namespace standin

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&standin::on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", standin::empty);
  m.impl("empty_strided", standin::empty_strided);
  m.impl("copy_", standin::copy_);
  m.impl("bmm.dtype", standin::bmm_wide);
  m.impl("_local_scalar_dense", standin::local_scalar);
  m.impl("set_.source_Storage_storage_offset", standin::set_storage);
}
