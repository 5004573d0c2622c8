// Which schedule an operation takes. A function of what the group agreed on, so that every rank
// chooses alike.
#pragma once

#include <optional>

#include "collectives/schedule.h"
#include "collectives/tuner.h"

namespace pycomm::collectives {

// Up to here a message fits a flat slot, when all ranks share memory; and up to here it is sent
// that way, unless ranks share processors: then every wait costs a switch of context, and one
// exchange of all bytes beats three of some.
inline constexpr std::uint64_t kFlatBytesMax = 64 * 1024;
inline constexpr std::uint64_t kRoomyFlatBytesMax = 16 * 1024;

// Shapes of group that make a difference.
struct GroupShape {
  bool shares_memory = false;                     // every pair of ranks has a shared-memory link
  std::uint64_t recursive_bytes_max = 64 * 1024;  // below it latency counts more than bandwidth
  bool is_deterministic = false;                  // bits depend on nothing but the inputs
  bool is_crowded = false;  // ranks of the host share processors, hence caches
  // Among ranks of one host: the way, instead of finding out; moved results of so much bypass the
  // cache.
  std::optional<Way> way;
  std::uint64_t stream_bytes_min = 8 * 1024 * 1024;
};

// What the rank that says most says in a flat exchange.
constexpr std::uint64_t flat_bytes(OpKind kind, std::uint64_t bytes, int world_size) {
  const bool is_for_each =
      kind == OpKind::kReduceScatter || kind == OpKind::kScatter || kind == OpKind::kAllToAll;
  return is_for_each ? bytes * static_cast<std::uint64_t>(world_size) : bytes;
}

// Whether the operation is one fused flat exchange.
constexpr bool is_flat(const GroupShape& shape, OpKind kind, std::uint64_t bytes, int world_size) {
  const std::uint64_t most = shape.is_crowded ? kFlatBytesMax : kRoomyFlatBytesMax;
  return shape.shares_memory && kind < OpKind::kAllToAllUneven && bytes <= most &&
         flat_bytes(kind, bytes, world_size) <= most;
}

// Whether a reduction rounds once, in the order of the ranks: always for 16-bit floats, whose
// partial sums would lose what makes them worth adding.
constexpr bool folds_in_rank_order(const GroupShape& shape, DType dtype) {
  return shape.is_deterministic || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

// The schedule over messages, for what is neither flat nor shared.
Schedule plan_over_messages(const GroupShape& shape, const PlanRequest& request);

}  // namespace pycomm::collectives
