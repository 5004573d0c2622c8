#include "communicator/shared_memory.h"

#include <array>
#include <atomic>
#include <mutex>

#include "communicator/fork_guard.h"
#include "platform/system.h"
#include "pycomm/communicator.h"

namespace pycomm {
namespace communicator {
namespace {

struct Slot {
  std::mutex mutex;
  SharedMemory memory;
};

// Every arena that this process has or inherited; never taken off. Read without a lock, also in a
// child whose parent was changing it.
struct Range {
  std::byte* first = nullptr;
  std::uint64_t bytes = 0;
  int fd = -1;
  std::uint64_t generation = 0;
};
constexpr std::size_t kRangesMax = 16;
std::array<Range, kRangesMax> ranges;
std::atomic<std::size_t> num_ranges{0};

void note_range(const platform::SealedMemory& memory) {
  const std::size_t index = num_ranges.load();
  if (index == kRangesMax) return;  // sixteen forks deep
  ranges[index] = {memory.data(), memory.bytes(), memory.fd(), fork_generation()};
  num_ranges.store(index + 1);
}

}  // namespace

void keep_inherited_memory_private() {
  for (std::size_t i = 0; i < num_ranges.load(); ++i) {
    const Range& range = ranges[i];
    if (range.generation == fork_generation()) {
      platform::map_privately(range.fd, range.first, range.bytes);
    }
  }
}

Result<SharedMemory> SharedMemory::of_process() {
  watch_forks();
  Slot& here = of_this_process<Slot>();
  std::lock_guard lock(here.mutex);
  if (!here.memory.arena) {
    auto budget = std::make_shared<transport::shm::Budget>(UINT64_MAX);
    auto arena = transport::shm::Arena::create(budget);
    if (!arena.is_ok()) return arena.status();
    note_range(arena.value()->memory());
    here.memory = {budget, std::move(arena).value()};
  }
  return here.memory;
}

}  // namespace communicator

MemoryOwner shared_memory_owner(const void* data) {
  using namespace communicator;
  for (std::size_t i = 0; i < num_ranges.load(std::memory_order_acquire); ++i) {
    const Range& range = ranges[i];
    const auto* at = static_cast<const std::byte*>(data);
    if (at < range.first || at >= range.first + range.bytes) continue;
    return range.generation == fork_generation() ? MemoryOwner::kThisProcess
                                                 : MemoryOwner::kAncestor;
  }
  return MemoryOwner::kNobody;
}

Result<std::shared_ptr<std::byte>> allocate_shared_memory(std::uint64_t bytes, SharedZeros zeros) {
  auto memory = communicator::SharedMemory::of_process();
  if (!memory.is_ok()) return memory.status();
  const std::shared_ptr<transport::shm::Arena> arena = memory.value().arena;
  using Contents = transport::shm::Arena::Contents;
  auto data =
      arena->allocate(bytes, zeros == SharedZeros::kYes ? Contents::kZeros : Contents::kAny);
  if (!data.is_ok()) return data.status();
  const auto free = [arena, made_in = communicator::fork_generation()](std::byte* freed) {
    // A forked child has the same pages: they are its parent's to free.
    if (made_in == communicator::fork_generation()) arena->free(freed);
  };
  return std::shared_ptr<std::byte>(data.value(), free);
}

}  // namespace pycomm
