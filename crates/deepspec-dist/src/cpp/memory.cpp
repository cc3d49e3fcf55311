// What libtorch's allocator for GPUs has given and gives; through its interface that needs no header of CUDA's.
#include "group.h"

#include <cstdint>

#include <c10/core/CachingDeviceAllocator.h>

extern "C" {

struct DeviceMemory {
  uint64_t in_use, peak, reserved_peak;
};

char* ds_device_memory(int index, DeviceMemory* found) {
  return caught([&] {
    const auto stats = c10::getDeviceAllocator(c10::kCUDA)->getDeviceStats(static_cast<c10::DeviceIndex>(index));
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    found->in_use = static_cast<uint64_t>(stats.allocated_bytes[all].current);
    found->peak = static_cast<uint64_t>(stats.allocated_bytes[all].peak);
    found->reserved_peak = static_cast<uint64_t>(stats.reserved_bytes[all].peak);
  });
}

char* ds_restart_device_peak(int index) {
  return caught([&] { c10::getDeviceAllocator(c10::kCUDA)->resetPeakStats(static_cast<c10::DeviceIndex>(index)); });
}
}
