#include "communicator/shared_memory.h"

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

// One a fork generation, never destroyed: memory may be freed behind static destructors, and a
// child must not touch a lock that its parent held.
Slot& slot() {
  static std::atomic<Slot*> current{new Slot};
  static std::atomic<std::uint64_t> generation{fork_generation()};
  std::uint64_t seen = generation.load();
  if (seen != fork_generation() && generation.compare_exchange_strong(seen, fork_generation())) {
    current.store(new Slot);
  }
  return *current.load();
}

}  // namespace

Result<SharedMemory> SharedMemory::of_process() {
  watch_forks();
  Slot& here = slot();
  std::lock_guard lock(here.mutex);
  if (!here.memory.arena) {
    auto budget = std::make_shared<transport::shm::Budget>(UINT64_MAX);
    auto arena = transport::shm::Arena::create(budget);
    if (!arena.is_ok()) return arena.status();
    here.memory = {budget, std::move(arena).value()};
  }
  return here.memory;
}

}  // namespace communicator

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
