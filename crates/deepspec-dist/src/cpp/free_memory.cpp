// Memory that a GPU has left, through libtorch's own table of allocators: no header of CUDA's is needed for it.
#include <cstdint>

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

extern "C" {

// Bytes that can still be had on a GPU, those that libtorch keeps for reuse among them; negative where nobody says.
int64_t ds_free_memory(int index) {
  try {
    auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(c10::DeviceType::CUDA));
    if (allocator == nullptr) return -1;
    const auto device = static_cast<c10::DeviceIndex>(index);
    const auto stats = allocator->getDeviceStats(device);
    const int64_t kept = stats.reserved_bytes[0].current - stats.allocated_bytes[0].current;
    return static_cast<int64_t>(allocator->getMemoryInfo(device).first) + (kept > 0 ? kept : 0);
  } catch (...) {
    return -1;
  }
}
}
