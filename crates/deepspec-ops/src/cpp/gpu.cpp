#include "gpu.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

// Written by build.rs: one string constant for each file of src/cuda.
#include "kernels.h"

namespace gpu {
namespace {

// CUlaunchAttribute and CUlaunchConfig.
struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    char room[64];
    int is_allowed;
  };
};

struct LaunchConfig {
  unsigned blocks[3], threads[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};

// The functions used from the CUDA driver and from NVRTC, whose C interfaces are stable. Every handle is a pointer, and
// every result is 0 on success.
struct Library {
  int (*device_get)(int* device, int index);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*retain_context)(void** context, int device);
  int (*push_context)(void* context);
  int (*pop_context)(void** context);
  int (*load_module)(void** module, const void* image);
  int (*get_function)(void** function, void* module, const char* name);
  int (*set_attribute)(void* function, int attribute, int value);
  int (*launch)(const LaunchConfig* config, void* function, void** arguments, void** extra);
  int (*error_string)(int result, const char** text);
  int (*create_program)(void** program, const char* text, const char* name, int headers, const char* const* header_texts,
                        const char* const* header_names);
  int (*compile_program)(void* program, int options, const char* const* texts);
  int (*log_size)(void* program, size_t* bytes);
  int (*log)(void* program, char* text);
  int (*binary_size)(void* program, size_t* bytes);
  int (*binary)(void* program, char* image);
  int (*destroy_program)(void** program);

  void check(int result, const char* what) const {
    if (result == 0) return;
    const char* words = nullptr;
    error_string(result, &words);
    TORCH_CHECK(false, what, ": ", words ? words : "an error that the driver does not name", " (CUDA error ", result, ")");
  }
};

// Null without a driver or a compiler. libtorch's own library of stubs, libcaffe2_nvrtc, finds and loads both.
const Library* library() {
  static const std::unique_ptr<Library> found = [] {
    std::unique_ptr<Library> none;
    // A stand-in may replace libtorch's CUDA part; its tensors are on no GPU, even if a driver is installed.
    if (!dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD)) return none;
    void* handle = dlopen("libcaffe2_nvrtc.so", RTLD_LAZY | RTLD_LOCAL);
    if (!handle) {
      TORCH_WARN("the kernels of this program cannot be compiled for the GPU, libtorch's own are taken and are slower: ", dlerror());
      return none;
    }
    auto library = std::make_unique<Library>();
    const auto take = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
      return function != nullptr;
    };
    const bool all =
        take(library->device_get, "cuDeviceGet") && take(library->device_attribute, "cuDeviceGetAttribute") &&
        take(library->retain_context, "cuDevicePrimaryCtxRetain") && take(library->push_context, "cuCtxPushCurrent_v2") &&
        take(library->pop_context, "cuCtxPopCurrent_v2") && take(library->load_module, "cuModuleLoadData") &&
        take(library->get_function, "cuModuleGetFunction") && take(library->launch, "cuLaunchKernelEx") &&
        take(library->set_attribute, "cuFuncSetAttribute") &&
        take(library->error_string, "cuGetErrorString") && take(library->create_program, "nvrtcCreateProgram") &&
        take(library->compile_program, "nvrtcCompileProgram") && take(library->log_size, "nvrtcGetProgramLogSize") &&
        take(library->log, "nvrtcGetProgramLog") && take(library->binary_size, "nvrtcGetCUBINSize") &&
        take(library->binary, "nvrtcGetCUBIN") && take(library->destroy_program, "nvrtcDestroyProgram");
    if (!all) {
      TORCH_WARN("the driver or the compiler is too old for the kernels of this program, libtorch's own are taken and are slower");
      return none;
    }
    return library;
  }();
  return found.get();
}

// Compiles a text for a GPU of `architecture`; returns the binary.
std::vector<char> compiled(const Library& library, Text text, const std::string& architecture) {
  constexpr const char* kTexts[] = {kernels::kLosses, kernels::kAttention, kernels::kRows, kernels::kDecode};
  const std::string whole = std::string(kernels::kValues) + kTexts[static_cast<size_t>(text)];
  void* program = nullptr;
  TORCH_CHECK(library.create_program(&program, whole.c_str(), "kernels.cu", 0, nullptr, nullptr) == 0, "NVRTC takes no program");
  const std::shared_ptr<void> freed(program, [&](void* made) { library.destroy_program(&made); });
  // Functions are device functions by default, because lambdas cannot be annotated.
  const char* const options[] = {"--std=c++17", "-default-device", architecture.c_str()};
  if (library.compile_program(program, 3, options) != 0) {
    size_t bytes = 0;
    library.log_size(program, &bytes);
    std::string log(bytes, ' ');
    library.log(program, log.data());
    TORCH_CHECK(false, "NVRTC: ", log);
  }
  size_t bytes = 0;
  TORCH_CHECK(library.binary_size(program, &bytes) == 0, "NVRTC made nothing for ", architecture);
  std::vector<char> image(bytes);
  TORCH_CHECK(library.binary(program, image.data()) == 0, "NVRTC gave nothing for ", architecture);
  return image;
}

// Makes the GPU's context current on this thread while the object lives.
struct InContext {
  const Library& library;

  InContext(const Library& library, void* context) : library(library) { library.check(library.push_context(context), "cuCtxPushCurrent"); }
  InContext(const InContext&) = delete;
  ~InContext() {
    void* context = nullptr;
    library.pop_context(&context);
  }
};

// The module compiled from a text; the handle is null before the first attempt and after a failure.
struct Module {
  bool is_tried = false;
  void* handle = nullptr;
};

// A kernel and the dynamic shared memory that it may use so far.
struct Function {
  void* handle = nullptr;
  unsigned shared = 0;
};

// A GPU and the modules compiled for it.
class Gpu {
 public:
  Gpu(const Library& library, int index) : library_(library) {
    int device = 0, major = 0, minor = 0;
    library.check(library.device_get(&device, index), "cuDeviceGet");
    constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_…
    library.check(library.device_attribute(&major, kMajor, device), "cuDeviceGetAttribute");
    library.check(library.device_attribute(&minor, kMinor, device), "cuDeviceGetAttribute");
    library.check(library.retain_context(&context_, device), "cuDevicePrimaryCtxRetain");
    architecture_ = "--gpu-architecture=sm_" + std::to_string(10 * major + minor);
    // bfloat16 in hardware needs compute capability 8.
    is_new_enough_ = major >= 8;
    can_overlap_ = major >= 9;
    constexpr int kShared = 97;  // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    library.check(library.device_attribute(&shared_, kShared, device), "cuDeviceGetAttribute");
  }

  bool has_bfloat16() const { return is_new_enough_; }

  // Whether the kernels of this text could be compiled. The first call compiles them.
  bool has(Text text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Module& module = modules_[static_cast<size_t>(text)];
    if (!module.is_tried && is_new_enough_) {
      try {
        const InContext in(library_, context_);
        const std::vector<char> image = compiled(library_, text, architecture_);
        library_.check(library_.load_module(&module.handle, image.data()), "cuModuleLoadData");
      } catch (const c10::Error& error) {
        TORCH_WARN("kernels of this program are not compiled for the GPU, libtorch's own are taken and are slower: ",
                   error.what_without_backtrace());
      }
    }
    module.is_tried = true;
    return module.handle != nullptr;
  }

  unsigned shared() const { return static_cast<unsigned>(shared_); }

  void launch(Text text, const char* name, const Shape& shape, void* stream, void** arguments) {
    const InContext in(library_, context_);
    void* function = find(text, name, shape.shared);
    constexpr int kOverlaps = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    LaunchAttribute attribute{kOverlaps, {}, {}};
    attribute.is_allowed = 1;
    const auto [x, y, z] = shape.blocks;
    const LaunchConfig config{{x, y, z}, {shape.threads, 1, 1}, shape.shared, stream, &attribute, shape.overlaps && can_overlap_ ? 1u : 0u};
    library_.check(library_.launch(&config, function, arguments, nullptr), name);
  }

 private:
  void* find(Text text, const char* name, unsigned shared) {
    // A kernel may use up to 48 KB, static shared memory included, without this attribute. The static part is not known
    // here, so the limit is lower.
    constexpr unsigned kUnasked = 16 << 10;
    constexpr int kShared = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    const std::lock_guard<std::mutex> lock(mutex_);
    Function& function = functions_[{text, name}];
    if (!function.handle) library_.check(library_.get_function(&function.handle, modules_[static_cast<size_t>(text)].handle, name), name);
    if (shared > std::max(kUnasked, function.shared)) {
      library_.check(library_.set_attribute(function.handle, kShared, static_cast<int>(shared)), name);
      function.shared = shared;
    }
    return function.handle;
  }

  const Library& library_;
  void* context_ = nullptr;
  std::string architecture_;
  bool is_new_enough_ = false, can_overlap_ = false;
  int shared_ = 0;
  std::mutex mutex_;
  std::array<Module, static_cast<size_t>(Text::kCount)> modules_{};
  std::map<std::pair<Text, std::string>, Function> functions_;
};

Gpu& gpu_of(const Library& library, int index) {
  static std::mutex mutex;
  static std::map<int, Gpu> gpus;
  const std::lock_guard<std::mutex> lock(mutex);
  return gpus.try_emplace(index, library, index).first->second;
}

}  // namespace

bool has_kernels(const at::Tensor& tensor, Text text) {
  if (!tensor.is_cuda()) return false;
  const Library* found = library();
  return found && gpu_of(*found, tensor.get_device()).has(text);
}

unsigned shared_memory(const at::Tensor& on) {
  const Library* found = on.is_cuda() ? library() : nullptr;
  return found ? gpu_of(*found, on.get_device()).shared() : 0;
}

bool has_bfloat16(int index) {
  const Library* found = library();
  return !found || gpu_of(*found, index).has_bfloat16();
}

void launch(Text text, const char* name, const Shape& shape, const at::Tensor& on, void** arguments) {
  const Library* found = library();
  TORCH_CHECK(found, "there is no compiler for kernels of GPUs");
  void* stream = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(on.device()).native_handle();
  gpu_of(*found, on.get_device()).launch(text, name, shape, stream, arguments);
}

}  // namespace gpu
