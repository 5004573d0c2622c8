// Logarithmic schedules for small sizes: recursive doubling, binomial tree, dissemination.
// Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
// operations in MPICH", IJHPCA 19(1), 2005; D. Hensgen, R. Finkel, U. Manber, "Two algorithms for
// barrier synchronization", IJPP 17(1), 1988.
#include <algorithm>
#include <bit>

#include "collectives/schedule.h"

namespace pycomm::collectives {

// Ranks beyond the largest power of two first fold into a neighbour, and get the result at the
// end. Partners combine in rank order, so that both hold the same bits.
Schedule plan_recursive_all_reduce(const PlanRequest& request) {
  Schedule schedule{.name = "recursive"};
  const int n = request.world_size;
  if (n == 1 || request.count == 0) return schedule;
  const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(n)));
  const int extra = n - power;  // pairs (0,1), (2,3), ... of the first 2 * extra ranks fold
  const Rank rank = request.rank;
  Step step{.kind = StepKind::kSend};
  step.count = request.count;
  schedule.begin_lane(0);
  const auto add = [&](StepKind kind, Rank peer, std::uint32_t name) {
    step.kind = kind;
    step.peer = peer;
    step.step = name;
    schedule.add(step);
  };
  constexpr std::uint32_t kFoldIn = 1000, kFoldOut = 1001;
  if (rank < 2 * extra && rank % 2 == 1) {
    add(StepKind::kSend, rank - 1, kFoldIn);
    add(StepKind::kRecv, rank - 1, kFoldOut);
    return schedule;
  }
  if (rank < 2 * extra) add(StepKind::kRecvCombine, rank + 1, kFoldIn);
  const int place = rank < 2 * extra ? rank / 2 : rank - extra;
  for (int bit = 1, round = 0; bit < power; bit *= 2, ++round) {
    const int other = place ^ bit;
    const Rank peer = other < extra ? other * 2 : other + extra;
    add(StepKind::kExchangeCombine, peer, static_cast<std::uint32_t>(round));
  }
  add(StepKind::kScale, kNoRank, 0);
  if (rank < 2 * extra) add(StepKind::kSend, rank + 1, kFoldOut);
  return schedule;
}

Schedule plan_tree_broadcast(const PlanRequest& request) {
  Schedule schedule{.name = "tree"};
  const int n = request.world_size;
  if (n == 1 || request.count == 0) return schedule;
  const int place = (request.rank - request.root + n) % n;
  const auto rank_at = [&](int p) { return (p + request.root) % n; };
  const std::uint64_t chunk =
      std::max<std::uint64_t>(request.chunk_bytes / request.element_bytes, 1);
  for (std::uint64_t offset = 0; offset < request.count; offset += chunk) {
    Step step{.kind = StepKind::kRecv};
    step.offset = offset;
    step.count = std::min(chunk, request.count - offset);
    step.chunk = static_cast<std::uint32_t>(offset / chunk);
    schedule.begin_lane(0);
    // The lowest set bit of a place leads to its parent; lower bits lead to its children.
    const int low =
        place == 0 ? static_cast<int>(std::bit_ceil(static_cast<unsigned>(n))) : place & -place;
    if (place != 0) {
      step.peer = rank_at(place - low);
      schedule.add(step);
    }
    step.kind = StepKind::kSend;
    for (int bit = low / 2; bit > 0; bit /= 2) {
      if (place + bit >= n) continue;
      step.peer = rank_at(place + bit);
      schedule.add(step);
    }
  }
  return schedule;
}

Schedule plan_barrier(const PlanRequest& request) {
  Schedule schedule{.name = "dissemination"};
  const int n = request.world_size;
  if (n == 1) return schedule;
  schedule.begin_lane(0);
  std::uint32_t round = 0;
  for (int distance = 1; distance < n; distance *= 2, ++round) {
    Step step{.kind = StepKind::kExchange};
    step.peer = (request.rank + distance) % n;
    step.from = (request.rank + n - distance) % n;
    step.step = round;
    schedule.add(step);
  }
  return schedule;
}

}  // namespace pycomm::collectives
