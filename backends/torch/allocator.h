// CPU tensors in memory that the host's other ranks reach, so that collectives work on them where
// they lie. torch's allocator is asked for everything else, and when shared memory is short.
#pragma once

#include <cstdint>

namespace pycomm::torch_backend {

// From now on, for all threads of this process.
void share_all_tensors();
// Around a part of this thread's code; they nest.
void begin_sharing_tensors();
void end_sharing_tensors();

struct AllocatorStats {
  std::uint64_t shared_bytes = 0;  // now
  std::uint64_t num_shared = 0;    // ever
  std::uint64_t num_refused = 0;   // that shared memory was too short for
};
AllocatorStats allocator_stats();

// Whether memory is this allocator's.
bool is_shared(const void* data);

}  // namespace pycomm::torch_backend
