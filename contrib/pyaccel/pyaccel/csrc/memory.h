// The device's memory: addresses that the host can't touch, the bytes behind them, and who holds how much.
//
// A device pointer is an address inside a reservation without access rights, so a host that follows it faults at once. No
// address is handed out twice. The bytes lie in a hidden host storage, which only this library's kernels know.
#pragma once

#include <list>
#include <map>
#include <mutex>

#include <sys/mman.h>

#include <ATen/native/Resize.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>

#include "settings.h"

namespace pyaccel {

c10::DeviceIndex current_device();

// A reservation; `live` blocks still have an address in it.
struct Region {
  uintptr_t base = 0;
  size_t size = 0;
  size_t used = 0;
  int64_t live = 0;

  bool contains(uintptr_t address) const {
    return address >= base && address < base + size;
  }
};

// What a device storage's pointer owns.
struct Block {
  c10::intrusive_ptr<c10::StorageImpl> host; // the bytes
  size_t charged;
  c10::DeviceIndex device;
  Region* region;
};

class DeviceMemory {
 public:
  using Stats = c10::CachingDeviceAllocator::DeviceStats;

  void set_limit(size_t bytes) {
    std::lock_guard lock(mutex_);
    limit_ = bytes;
  }

  void set_reservation(size_t bytes) {
    std::lock_guard lock(mutex_);
    reservation_ = bytes;
  }

  // Books `bytes` and hands out an address for them. Throws c10::OutOfMemoryError over the limit.
  std::pair<void*, Block> take(size_t bytes, c10::DeviceIndex index) {
    const size_t charged = (bytes + kGranule - 1) / kGranule * kGranule;
    std::lock_guard lock(mutex_);
    const size_t held = stats_.allocated_bytes[0].current;
    if (held + charged > limit_) {
      stats_.num_ooms++;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, device(index), " is out of memory: ", bytes, " bytes wanted, ",
          limit_ - std::min(held, limit_), " of ", limit_, " free");
    }
    Region* region = nullptr;
    void* address = charged == 0 ? nullptr : next_address(charged, &region);
    for (auto* stat : {&stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes}) {
      (*stat)[0].increase(charged);
    }
    stats_.requested_bytes[0].increase(bytes);
    stats_.allocation[0].increase(1);
    return {address, Block{{}, charged, index, region}};
  }

  void give_back(const Block& block) {
    std::lock_guard lock(mutex_);
    for (auto* stat : {&stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes}) {
      (*stat)[0].decrease(block.charged);
    }
    stats_.allocation[0].decrease(1);
    if (block.region != nullptr && --block.region->live == 0) {
      drop_if_full(block.region);
    }
  }

  Stats stats() {
    std::lock_guard lock(mutex_);
    return stats_;
  }

  size_t limit() {
    std::lock_guard lock(mutex_);
    return limit_;
  }

  void reset_peak() {
    std::lock_guard lock(mutex_);
    each_stat([](auto& stat) { stat.reset_peak(); });
  }

  void reset_accumulated() {
    std::lock_guard lock(mutex_);
    each_stat([](auto& stat) { stat.reset_accumulated(); });
    stats_.num_ooms = 0;
  }

  bool owns(const void* pointer) {
    std::lock_guard lock(mutex_);
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    return std::any_of(regions_.begin(), regions_.end(), [&](const Region& r) { return r.contains(address); });
  }

 private:
  static constexpr size_t kGranule = 512;
  static constexpr size_t kGuard = 4096; // an overrun of one block doesn't reach the next one's address

  template <typename F>
  void each_stat(F f) {
    for (auto* stat :
         {&stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes, &stats_.requested_bytes, &stats_.allocation}) {
      f((*stat)[0]);
    }
  }

  void* next_address(size_t bytes, Region** region) {
    if (regions_.empty() || regions_.back().used + bytes + kGuard > regions_.back().size) {
      reserve(bytes + kGuard);
    }
    *region = &regions_.back();
    auto* address = reinterpret_cast<void*>((*region)->base + (*region)->used);
    (*region)->used += (bytes + kGuard + kGuard - 1) / kGuard * kGuard;
    (*region)->live++;
    return address;
  }

  // Where the process may not have much address space (ulimit -v), a smaller reservation does too.
  void reserve(size_t at_least) {
    for (size_t size = std::max(reservation_, 2 * at_least); size >= at_least; size /= 2) {
      void* base = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (base != MAP_FAILED) {
        regions_.push_back(Region{reinterpret_cast<uintptr_t>(base), size, 0, 0});
        return;
      }
    }
    TORCH_CHECK(false, "no address space for ", at_least, " bytes of ", device_name(), " memory; raise ulimit -v");
  }

  void drop_if_full(Region* region) {
    if (region == &regions_.back()) {
      return;
    }
    munmap(reinterpret_cast<void*>(region->base), region->size);
    regions_.remove_if([&](const Region& r) { return &r == region; });
  }

  std::mutex mutex_;
  std::list<Region> regions_;
  Stats stats_;
  size_t limit_ = size_t{4} << 30;
  size_t reservation_ = size_t{1} << 40;
};

inline DeviceMemory& memory(c10::DeviceIndex index) {
  static auto* the = new std::array<DeviceMemory, kMaxDevices>();
  return the->at(index);
}

inline void delete_block(void* context) {
  auto* block = static_cast<Block*>(context);
  memory(block->device).give_back(*block);
  delete block;
}

// A device pointer for the bytes of a host storage.
inline c10::DataPtr wrap_host(c10::intrusive_ptr<c10::StorageImpl> host, c10::DeviceIndex index) {
  auto [address, block] = memory(index).take(host->nbytes(), index);
  block.host = std::move(host);
  return {address, new Block(std::move(block)), &delete_block, device(index)};
}

inline c10::intrusive_ptr<c10::StorageImpl> new_host_storage(size_t bytes) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::GetCPUAllocator(), /*resizable=*/true);
}

inline Block& block_of(const c10::StorageImpl& storage) {
  auto* block = storage.data_ptr().cast_context<Block>(&delete_block);
  TORCH_CHECK(block != nullptr, "a ", device_name(), " storage whose memory came from elsewhere");
  return *block;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto index = current_device();
    auto [address, block] = memory(index).take(bytes, index); // before the host's memory is asked for
    auto owned = std::make_unique<Block>(std::move(block));
    try {
      owned->host = new_host_storage(bytes);
    } catch (...) {
      memory(index).give_back(*owned);
      throw;
    }
    return {address, owned.release(), &delete_block, device(index)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    TORCH_CHECK(false, "a raw copy of ", bytes, " bytes between device pointers isn't supported: copy tensors");
  }

  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    return memory(index).stats();
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    memory(index).reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    memory(index).reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const size_t total = memory(index).limit();
    const size_t held = memory(index).stats().allocated_bytes[0].current;
    return {total - std::min(held, total), total};
  }
};

inline DeviceAllocator* allocator() {
  static auto* the = new DeviceAllocator();
  return the;
}

// After a kernel resized the bytes behind a device storage: book the new size, at a new address.
inline void follow_host(c10::StorageImpl& storage) {
  const Block& block = block_of(storage);
  if (block.host->nbytes() != storage.nbytes()) {
    const size_t bytes = block.host->nbytes();
    storage.set_data_ptr_noswap(wrap_host(block.host, block.device));
    storage.set_nbytes(bytes);
  }
}

// Page-locked host memory, as far as anyone can tell: ordinary memory that `is_pinned` knows.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    if (data != nullptr) {
      std::lock_guard lock(mutex());
      ranges()[reinterpret_cast<uintptr_t>(data)] = bytes;
    }
    return {data, data, &free, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free;
  }

  static bool owns(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard lock(mutex());
    auto after = ranges().upper_bound(address);
    return after != ranges().begin() && address < std::prev(after)->first + std::prev(after)->second;
  }

 private:
  static void free(void* data) {
    if (data != nullptr) {
      std::lock_guard lock(mutex());
      ranges().erase(reinterpret_cast<uintptr_t>(data));
    }
    c10::free_cpu(data);
  }
  static std::mutex& mutex() {
    static auto* the = new std::mutex();
    return *the;
  }
  static std::map<uintptr_t, size_t>& ranges() {
    static auto* the = new std::map<uintptr_t, size_t>();
    return *the;
  }
};

inline PinnedAllocator* pinned_allocator() {
  static auto* the = new PinnedAllocator();
  return the;
}

} // namespace pyaccel
