// The shared memory of this process, whatever groups there are: tensors may be made before the
// first group and outlive the last.
#pragma once

#include <memory>

#include "pycomm/status.h"
#include "transport/shm/arena.h"

namespace pycomm::communicator {

struct SharedMemory {
  std::shared_ptr<transport::shm::Budget> budget;
  std::shared_ptr<transport::shm::Arena> arena;

  // Of this process; a forked child has one of its own. Errors: kSystem.
  static Result<SharedMemory> of_process();
};

// In a forked child, before anything else: arenas of its parent become its own view. What it writes
// there stays with it; what its parent writes it may still see.
void keep_inherited_memory_private();

}  // namespace pycomm::communicator
