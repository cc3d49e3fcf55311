// Statistics of libtorch's GPU allocator, through its interface that needs no CUDA headers.
#include "gpu.h"
#include "group.h"

#include <cstdint>

#include <c10/core/Allocator.h>
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

// Whether a GPU supports bfloat16 in hardware; true if unknown.
bool ds_has_bfloat16(int index) {
  try {
    return gpu::has_bfloat16(index);
  } catch (...) {
    return true;
  }
}

// Bytes that can still be allocated on a GPU, including what libtorch keeps for reuse; negative if unknown.
int64_t ds_free_memory(int index) {
  try {
    auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(c10::DeviceType::CUDA));
    if (allocator == nullptr) return -1;
    const auto device = static_cast<c10::DeviceIndex>(index);
    const auto stats = allocator->getDeviceStats(device);
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const int64_t kept = stats.reserved_bytes[all].current - stats.allocated_bytes[all].current;
    return static_cast<int64_t>(allocator->getMemoryInfo(device).first) + (kept > 0 ? kept : 0);
  } catch (...) {
    return -1;
  }
}
}
