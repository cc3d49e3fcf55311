// A GPU's memory: host memory with an account, and an end.
#include "standin.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace standin {

namespace {

// Blocks come in multiples of this, as libtorch's own allocator for GPUs gives them.
constexpr size_t kRounding = 512;
constexpr size_t kUsual = size_t{80} << 30;

size_t capacity() {
  static const size_t bytes = [] {
    const char* text = std::getenv("DEEPSPEC_STANDIN_MEMORY");
    return text == nullptr ? kUsual : static_cast<size_t>(std::strtoull(text, nullptr, 10));
  }();
  return bytes;
}

// What a program that asks is told to be free, whatever is: one that counts on more than there is.
std::optional<size_t> alleged() {
  const char* text = std::getenv("DEEPSPEC_STANDIN_FREE");
  if (text == nullptr) return std::nullopt;
  return static_cast<size_t>(std::strtoull(text, nullptr, 10));
}

std::string readable(size_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2);
  if (bytes >= size_t{1} << 30) text << static_cast<double>(bytes) / (1 << 30) << " GiB";
  else if (bytes >= size_t{1} << 20) text << static_cast<double>(bytes) / (1 << 20) << " MiB";
  else if (bytes >= size_t{1} << 10) text << static_cast<double>(bytes) / (1 << 10) << " KiB";
  else text << bytes << " bytes";
  return text.str();
}

// What every GPU has given.
class Accounts {
 public:
  // Books `bytes`, rounded up, and returns what was booked.
  size_t take(c10::DeviceIndex index, size_t bytes) {
    const size_t booked = (bytes + kRounding - 1) / kRounding * kRounding;
    std::unique_lock<std::mutex> guard(mutex_);
    MemoryUse& use = uses_.at(index);
    if (use.live + booked > capacity()) {
      ++use.refused;
      const size_t live = use.live;
      guard.unlock();
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", readable(booked), ". GPU ",
                       static_cast<int>(index), " has a total capacity of ", readable(capacity()), " of which ",
                       readable(capacity() - live), " is free. Of the allocated memory ", readable(live),
                       " is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.");
    }
    use.live += booked;
    use.peak = std::max(use.peak, use.live);
    ++use.allocations;
    return booked;
  }

  void give_back(c10::DeviceIndex index, size_t booked) {
    std::lock_guard<std::mutex> guard(mutex_);
    uses_.at(index).live -= booked;
  }

  void restart_peak(c10::DeviceIndex index) {
    std::lock_guard<std::mutex> guard(mutex_);
    uses_.at(index).peak = uses_.at(index).live;
  }

  MemoryUse of(c10::DeviceIndex index) {
    std::lock_guard<std::mutex> guard(mutex_);
    return uses_.at(index);
  }

 private:
  std::mutex mutex_;
  std::array<MemoryUse, 64> uses_;
};

// Never destroyed, like all that tensors of other statics may still need.
Accounts& accounts() {
  static Accounts* const accounts = new Accounts;
  return *accounts;
}

// A block of a GPU: either its own host memory or another storage's.
struct Block {
  c10::DeviceIndex index;
  size_t booked;
  void* own = nullptr;
  std::optional<c10::Storage> adopted;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  accounts().give_back(block->index, block->booked);
  std::free(block->own);
  delete block;
}

class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex index = current_device();
    if (bytes == 0) return {nullptr, c10::Device(kGpu, index)};
    const size_t booked = accounts().take(index, bytes);
    void* own = std::aligned_alloc(kRounding, booked);
    if (own == nullptr) {
      accounts().give_back(index, booked);
      TORCH_CHECK(false, "the stand-in for a GPU finds no host memory for ", bytes, " bytes");
    }
    return {own, new Block{index, booked, own, std::nullopt}, &release, c10::Device(kGpu, index)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const MemoryUse use = accounts().of(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*bytes)[0].current = static_cast<int64_t>(use.live);
      (*bytes)[0].peak = static_cast<int64_t>(use.peak);
    }
    stats.num_ooms = static_cast<int64_t>(use.refused);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override { accounts().restart_peak(index); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    return {alleged().value_or(capacity() - accounts().of(index).live), capacity()};
  }
};

// Host memory whose blocks are remembered.
class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr data = c10::GetDefaultCPUAllocator()->allocate(bytes);
    void* start = data.get();
    if (start == nullptr) return data;
    std::lock_guard<std::mutex> guard(mutex_);
    blocks_[static_cast<char*>(start)] = bytes;
    auto* held = new c10::DataPtr(std::move(data));
    return {start, held, &Pinned::release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool holds(const void* data) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto next = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(data)));
    if (next == blocks_.begin()) return false;
    --next;
    return static_cast<const char*>(data) < next->first + next->second;
  }

 private:
  static void release(void* context);

  std::mutex mutex_;
  std::map<char*, size_t> blocks_;
};

Pinned& pinned() {
  static Pinned* const pinned = new Pinned;
  return *pinned;
}

void Pinned::release(void* context) {
  auto* held = static_cast<c10::DataPtr*>(context);
  {
    std::lock_guard<std::mutex> guard(pinned().mutex_);
    pinned().blocks_.erase(static_cast<char*>(held->get()));
  }
  delete held;
}

Memory& gpu_memory() {
  static Memory* const memory = new Memory;
  return *memory;
}

[[maybe_unused]] const bool registered = (c10::SetAllocator(kGpu, &gpu_memory()), true);

}  // namespace

c10::Allocator* memory() {
  return &gpu_memory();
}

c10::Allocator* pinned_memory() {
  return &pinned();
}

bool is_pinned(const void* data) {
  return pinned().holds(data);
}

c10::Storage adopt(const c10::Storage& host, c10::DeviceIndex index) {
  const size_t bytes = host.nbytes();
  const c10::Device device(kGpu, index);
  c10::DataPtr data(nullptr, device);
  if (bytes > 0) {
    const size_t booked = accounts().take(index, bytes);
    data = c10::DataPtr(host.mutable_data(), new Block{index, booked, nullptr, host}, &release, device);
  }
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), memory(), /*resizable=*/true);
}

MemoryUse memory_use(c10::DeviceIndex index) {
  return accounts().of(index);
}

}  // namespace standin
