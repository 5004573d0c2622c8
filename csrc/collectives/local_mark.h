// How far a rank is in operations among ranks of one host (local_run.h).
#pragma once

#include <atomic>
#include <cstdint>

#include "base/spin.h"

namespace pycomm::collectives {

// Ranks of a group that exchanges through slots and windows.
inline constexpr int kLocalWorldMax = 64;

// What a rank says of itself, in memory that it alone writes.
struct alignas(base::kCacheLineBytes) LocalMark {
  std::atomic<std::uint64_t> position;
  // Its memory may change from now on although others may be reading: what they read is void.
  std::atomic<std::uint64_t> is_withdrawn;
};

}  // namespace pycomm::collectives
