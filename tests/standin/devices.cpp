// What libtorch asks about GPUs: how many there are, which is current, streams, events and generators.
#include "standin.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace standin {

namespace {

thread_local c10::DeviceIndex current = 0;

// As the driver reads it: devices up to the first that does not exist.
int visible(int count) {
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (text == nullptr) return count;
  std::istringstream list(text);
  std::string entry;
  int shown = 0;
  while (std::getline(list, entry, ',')) {
    char* end = nullptr;
    const long index = std::strtol(entry.c_str(), &end, 10);
    if (end == entry.c_str() || index < 0 || index >= count) break;
    ++shown;
  }
  return std::min(shown, count);
}

int counted() {
  const char* text = std::getenv("DEEPSPEC_STANDIN_DEVICES");
  const long count = text == nullptr ? 1 : std::strtol(text, nullptr, 10);
  return visible(static_cast<int>(std::clamp(count, 0L, 64L)));
}

}  // namespace

c10::DeviceIndex device_count() {
  static const int count = counted();
  return static_cast<c10::DeviceIndex>(count);
}

c10::DeviceIndex current_device() {
  return current;
}

void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "CUDA error: invalid device ordinal: ", static_cast<int>(index), " of ",
              static_cast<int>(device_count()));
  current = index;
}

namespace {

// One stream a GPU, and on it everything is done when the call returns: events are nothing.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kGpu; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kGpu, current}; }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override { return only(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return only(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return only(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return only(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return only(stream.device()); }

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    static char recorded;
    *event = &recorded;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { waited("synchronize stream"); }
  void synchronizeEvent(void*) const override { waited("synchronize event"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { waited("synchronize device"); }

 private:
  static c10::Stream only(c10::Device device) {
    return c10::Stream(c10::Stream::DEFAULT, {kGpu, device.has_index() ? device.index() : current});
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

// libtorch looks the class up by this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return device_count(); }
  at::DeviceIndex deviceCount() const override { return device_count(); }
  at::DeviceIndex current_device() const override { return current; }
  at::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(at::DeviceIndex index) const override { set_current_device(index); }
  at::DeviceIndex exchangeDevice(at::DeviceIndex index) const override {
    const at::DeviceIndex before = current;
    set_current_device(index);
    return before;
  }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex index) const override { return exchangeDevice(index); }
  void deviceSynchronize(at::DeviceIndex) const override { waited("synchronize device"); }
  at::Allocator* getCUDADeviceAllocator() const override { return memory(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }

  const at::Generator& getDefaultGenerator(at::DeviceIndex index) const override {
    static const std::vector<at::Generator>* const generators = [] {
      auto* all = new std::vector<at::Generator>;
      for (int i = 0; i < std::max<int>(device_count(), 1); ++i) all->push_back(at::detail::createCPUGenerator());
      return all;
    }();
    const size_t place = index < 0 ? current : index;
    TORCH_CHECK(place < generators->size(), "CUDA error: invalid device ordinal: ", place);
    return (*generators)[place];
  }
  at::Generator getNewGenerator(at::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

}  // namespace standin

namespace at {
using standin::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
