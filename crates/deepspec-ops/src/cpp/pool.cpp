// Memory of libtorch's large CPU tensors. Freed blocks are kept for reuse, but the process holds hardly more memory
// than it once needed at one time. In the C allocator's heap the gaps between such blocks take half as much again.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace {

// Smaller blocks are left to the C allocator, which is faster; they do not widen its gaps.
constexpr size_t kLarge = 128 << 10;

// From this many bytes on, a block requests huge pages.
constexpr size_t kHuge = 4 << 20;

// Kept blocks may exceed the peak use by this many bytes. Otherwise some blocks would be unmapped at every peak and
// their pages requested again, which took a thirtieth of a small training step.
constexpr size_t kSpare = 4 << 20;

struct Block {
  void* start = nullptr;
  size_t size = 0;
};

// A block in use, of which the first `needed` bytes are needed.
struct Use {
  size_t size, needed;
};

class Pool final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override;

  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  c10::DeleterFnPtr raw_deleter() const override;

  void release(void* start);

 private:
  void* take(size_t size);
  void shrink(size_t most);
  Block reuse(size_t size);
  Block forget(uint64_t number);

  std::mutex mutex_;
  std::unordered_map<void*, Use> used_;
  // Blocks in use that are larger than needed.
  std::set<void*> roomy_;
  // Freed blocks in the order in which they were freed, and their numbers by size.
  std::map<uint64_t, Block> kept_;
  std::set<std::pair<size_t, uint64_t>> by_size_;
  uint64_t freed_ = 0;
  // Bytes needed now, their maximum so far, and bytes held.
  size_t in_use_ = 0, most_ = 0, held_ = 0;
};

Pool& pool() {
  // Never destroyed: tensors in other static variables may outlive it.
  static Pool* const pool = new Pool;
  return *pool;
}

c10::DataPtr Pool::allocate(size_t bytes) {
  if (bytes < kLarge) return c10::GetDefaultCPUAllocator()->allocate(bytes);
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  TORCH_CHECK(bytes <= SIZE_MAX - page, "no memory for ", bytes, " bytes");
  void* start = take((bytes + page - 1) / page * page);
  TORCH_CHECK(start != nullptr, "no memory for ", bytes, " bytes");
  return {start, start, raw_deleter(), c10::Device(c10::DeviceType::CPU)};
}

// Kernels that allocate without a tensor free their memory with this function, whatever its size.
c10::DeleterFnPtr Pool::raw_deleter() const {
  return [](void* start) { pool().release(start); };
}

// The system provides memory in pages of 4 KiB, and the first write to each page faults. Large blocks request huge
// pages: a training step took 296 ms without them and 280 ms with them. Other blocks, of which `filled` bytes have
// pages, get all missing pages at once.
void ask_for_pages(char* start, size_t filled, size_t size) {
  if (size >= kHuge) {
    madvise(start, size, MADV_HUGEPAGE);
    return;
  }
#ifdef MADV_POPULATE_WRITE
  madvise(start + filled, size - filled, MADV_POPULATE_WRITE);
#endif
}

// Returns a block of `size` bytes, whole pages; null if the system has no memory left.
void* Pool::take(size_t size) {
  std::lock_guard<std::mutex> guard(mutex_);
  Block block = reuse(size);
  const size_t most = std::max(most_, in_use_ + size);
  if (block.size < size) {
    held_ += size - block.size;
    shrink(most);
    // A reused block keeps its pages; the system adds the missing ones.
    void* fitted = block.start == nullptr
        ? mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        : mremap(block.start, block.size, size, MREMAP_MAYMOVE);
    if (fitted == MAP_FAILED) {
      if (block.start != nullptr) munmap(block.start, block.size);
      held_ -= size;
      return nullptr;
    }
    ask_for_pages(static_cast<char*>(fitted), block.size, size);
    block = {fitted, size};
  }
  in_use_ += size;
  most_ = most;
  used_.emplace(block.start, Use{block.size, size});
  if (block.size > size) roomy_.insert(block.start);
  return block.start;
}

// Returns to the system what is held beyond `most`: first kept blocks, the oldest first, but for kSpare bytes. Then it
// cuts the unneeded ends of blocks in use. Sparing these ends within kSpare as well made no step faster and took two
// more megabytes.
void Pool::shrink(size_t most) {
  while (held_ > most + kSpare && !kept_.empty()) {
    Block oldest = forget(kept_.begin()->first);
    munmap(oldest.start, oldest.size);
    held_ -= oldest.size;
  }
  while (held_ > most && !roomy_.empty()) {
    void* start = *roomy_.begin();
    Use& use = used_.find(start)->second;
    munmap(static_cast<char*>(start) + use.needed, use.size - use.needed);
    held_ -= use.size - use.needed;
    use.size = use.needed;
    roomy_.erase(roomy_.begin());
  }
}

// Returns a kept block of this size, else the next larger one, else the next smaller one. Blocks that differ by more
// than a factor of two are not used.
Block Pool::reuse(size_t size) {
  auto found = by_size_.lower_bound({size, 0});
  if (found != by_size_.end() && found->first / 2 <= size) return forget(found->second);
  if (found == by_size_.begin()) return {};
  --found;
  return found->first >= size / 2 ? forget(found->second) : Block{};
}

Block Pool::forget(uint64_t number) {
  auto kept = kept_.find(number);
  Block block = kept->second;
  kept_.erase(kept);
  by_size_.erase({block.size, number});
  return block;
}

void Pool::release(void* start) {
  std::unique_lock<std::mutex> guard(mutex_);
  auto used = used_.find(start);
  if (used == used_.end()) {
    guard.unlock();
    c10::GetDefaultCPUAllocator()->raw_deleter()(start);
    return;
  }
  Block block{start, used->second.size};
  in_use_ -= used->second.needed;
  used_.erase(used);
  roomy_.erase(start);
  by_size_.insert({block.size, freed_});
  kept_.emplace(freed_, block);
  ++freed_;
}

}  // namespace

extern "C" {

// Used from now on for the rest of the process; existing tensors are freed as they were allocated.
void ds_pool_large_blocks() {
  c10::SetCPUAllocator(&pool());
}
}
