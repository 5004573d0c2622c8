// Which schedule an operation takes. A function of what the group agreed on, so that every rank
// chooses alike.
#pragma once

#include "collectives/schedule.h"

namespace pycomm::collectives {

// Up to here a message fits a flat slot, when all ranks share memory.
inline constexpr std::uint64_t kFlatBytesMax = 4096;

// Shapes of group that make a difference.
struct GroupShape {
  bool shares_memory = false;                     // every pair of ranks has a shared-memory link
  std::uint64_t recursive_bytes_max = 64 * 1024;  // below it latency counts more than bandwidth
};

// Whether the operation is one fused flat exchange.
constexpr bool is_flat(const GroupShape& shape, std::uint64_t bytes) {
  return shape.shares_memory && bytes <= kFlatBytesMax;
}

// The schedule over messages, for what is neither flat nor shared.
Schedule plan_over_messages(const GroupShape& shape, const PlanRequest& request);

}  // namespace pycomm::collectives
