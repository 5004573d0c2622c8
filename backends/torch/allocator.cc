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

// Blocks that are out, by address: a deleter has nothing but that. Never destroyed: tensors may
// outlive static destructors.
struct Blocks {
  std::mutex mutex;
  std::map<const void*, std::pair<std::shared_ptr<std::byte>, std::size_t>> by_address;
};
Blocks& blocks() {
  static auto* all = new Blocks;
  return *all;
}

class SharedAllocator final : public c10::Allocator {
 public:
  explicit SharedAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < kSharedBytesMin || !is_wanted()) return inner_->allocate(bytes);
    auto memory = allocate_shared_memory(bytes, SharedZeros::kNo);
    if (!memory.is_ok()) {
      if (num_refused.fetch_add(1) == 0) {
        TORCH_WARN("pycomm: a tensor of ", bytes,
                   " bytes could not be put into shared memory and lies in private memory, as "
                   "others may (said once): ",
                   memory.status().message());
      }
      return inner_->allocate(bytes);
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
    std::pair<std::shared_ptr<std::byte>, std::size_t> block;
    Blocks& all = blocks();
    {
      std::lock_guard lock(all.mutex);
      const auto it = all.by_address.find(data);
      if (it != all.by_address.end()) {
        block = std::move(it->second);
        all.by_address.erase(it);
      }
    }
    if (!block.first) return c10::GetDefaultCPUAllocator()->raw_deleter()(data);
    shared_bytes -= block.second;
  }

  c10::Allocator* const inner_;
};

// Once; with nobody sharing it hands everything through.
void install() {
  static auto* const allocator = [] {
    auto* made = new SharedAllocator(c10::GetCPUAllocator());
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

bool is_shared(const void* data) {
  Blocks& all = blocks();
  std::lock_guard lock(all.mutex);
  const auto next = all.by_address.upper_bound(data);
  if (next == all.by_address.begin()) return false;
  const auto& [first, block] = *std::prev(next);
  return static_cast<const std::byte*>(data) < static_cast<const std::byte*>(first) + block.second;
}

}  // namespace pycomm::torch_backend
