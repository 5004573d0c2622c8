#include "allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "pycomm/communicator.h"

namespace pycomm::torch_backend {
namespace {

// What is smaller goes through slots and windows as fast, and would waste most of a page.
constexpr std::size_t kSharedBytesMin = 16 * 1024;

thread_local int sharing_depth = 0;
// The process that shares all; a forked one (a data loader's worker) talks to nobody.
std::atomic<pid_t> sharing_process{0};
std::atomic<std::uint64_t> shared_bytes{0}, num_shared{0}, num_refused{0};

// Blocks that are out, by address: a deleter has nothing but that. One a process, since a child
// must not wait for a lock that its parent held; never destroyed, since tensors may outlive static
// destructors.
struct Blocks {
  std::mutex mutex;
  std::map<const void*, std::pair<std::shared_ptr<std::byte>, std::size_t>> by_address;
};
Blocks& blocks() {
  static std::atomic<Blocks*> current{new Blocks};
  static std::atomic<pid_t> owner{getpid()};
  pid_t seen = owner.load();
  if (seen != getpid() && owner.compare_exchange_strong(seen, getpid())) current = new Blocks;
  return *current.load();
}

class SharedAllocator final : public c10::Allocator {
 public:
  // Asked for everything else.
  static inline c10::Allocator* inner = nullptr;

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < kSharedBytesMin || !is_wanted()) return inner->allocate(bytes);
    auto memory = allocate_shared_memory(bytes, SharedZeros::kNo);
    if (!memory.is_ok()) {
      if (num_refused.fetch_add(1) == 0) {
        TORCH_WARN("pycomm: a tensor of ", bytes,
                   " bytes could not be put into shared memory and lies in private memory, as "
                   "others may (said once): ",
                   memory.status().message());
      }
      return inner->allocate(bytes);
    }
    std::byte* data = memory.value().get();
    Blocks& all = blocks();
    {
      std::lock_guard lock(all.mutex);
      all.by_address[data] = {std::move(memory).value(), bytes};
    }
    shared_bytes += bytes;
    ++num_shared;
    return {data, data, &free_either, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_either; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  static bool is_wanted() { return sharing_depth > 0 || sharing_process.load() == getpid(); }

  // Of a block here or of the inner allocator: raw pointers do not tell.
  static void free_either(void* data) {
    switch (shared_memory_owner(data)) {
      case MemoryOwner::kNobody: inner->raw_deleter()(data); return;
      // A forked child's copy of its parent's: not its to free, and the lock may be held for good.
      case MemoryOwner::kAncestor: return;
      case MemoryOwner::kThisProcess: break;
    }
    std::pair<std::shared_ptr<std::byte>, std::size_t> block;
    Blocks& all = blocks();
    {
      std::lock_guard lock(all.mutex);
      const auto it = all.by_address.find(data);
      TORCH_INTERNAL_ASSERT(it != all.by_address.end());
      block = std::move(it->second);
      all.by_address.erase(it);
    }
    shared_bytes -= block.second;
  }
};

// Once; with nobody sharing it hands everything through.
void install() {
  static auto* const allocator = [] {
    SharedAllocator::inner = c10::GetCPUAllocator();
    auto* made = new SharedAllocator();
    c10::SetCPUAllocator(made, /*priority=*/1);
    return made;
  }();
  static_cast<void>(allocator);
}

}  // namespace

void share_all_tensors() {
  install();
  sharing_process = getpid();
}

void begin_sharing_tensors() {
  install();
  ++sharing_depth;
}

void end_sharing_tensors() { --sharing_depth; }

AllocatorStats allocator_stats() { return {shared_bytes, num_shared, num_refused}; }

bool is_shared(const void* data) { return shared_memory_owner(data) == MemoryOwner::kThisProcess; }

}  // namespace pycomm::torch_backend
