// A schedule: what one rank does in one collective, as flat records. Schedules are functions of
// (kind, rank, world, size) and plain data; the executor runs them over any transport, the checker
// proves a whole set of them, the simulator runs the same objects at sizes no machine here has.
//
// Shape: stages of lanes of steps. The steps of a lane run in order; lanes of a stage run
// concurrently and touch disjoint memory (or only read it); a stage starts when the one before is
// done. Offsets and counts are elements. A message is named (step, chunk) within its operation.
//
// Before a schedule starts, what a rank gives itself is in place: all_reduce and the root of a
// broadcast work on output, which holds the input; a rank's own part of all_gather, gather, scatter
// and all_to_all is where it belongs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pycomm/operation.h"

namespace pycomm::collectives {

// `span` is buffer[offset, count).
enum class StepKind : std::uint8_t {
  kSend,             // span -> peer
  kRecv,             // peer -> span
  kRecvCombine,      // span = received op span
  kExchange,         // send span to peer and receive it from `from`
  kExchangeCombine,  // swap with peer; span = lower rank's op higher rank's
  kGatherFold,       // span = rank 0's op rank 1's op ...: others' arrive, mine is own[own_offset)
  kSwapFold,         // kGatherFold of a span that goes to every other rank at the same time
  kSendAll,          // span -> every other rank
  kScale,            // span /= world_size, if the reduction is an average
};

enum class BufferId : std::uint8_t {
  kInput,
  kOutput,
  kLane,  // a buffer of the lane's own, at offset 0
};

struct Step {
  StepKind kind;
  BufferId buffer = BufferId::kOutput;
  BufferId own = BufferId::kOutput;  // of kGatherFold
  Rank peer = kNoRank;
  Rank from = kNoRank;     // of kExchange
  std::uint32_t step = 0;  // names the message
  std::uint32_t chunk = 0;
  std::uint64_t offset = 0;
  std::uint64_t count = 0;
  std::uint64_t own_offset = 0;
};

// Steps that talk to every other rank at once.
constexpr bool is_with_all(StepKind kind) {
  return kind == StepKind::kGatherFold || kind == StepKind::kSwapFold || kind == StepKind::kSendAll;
}
constexpr bool folds(StepKind kind) {
  return kind == StepKind::kGatherFold || kind == StepKind::kSwapFold;
}

struct Lane {
  std::uint32_t stage = 0;
  std::uint32_t first = 0;  // into steps
  std::uint32_t count = 0;
};

// How a fused schedule runs as one direct call; its steps are its expansion.
enum class Fused : std::uint8_t {
  kNo,
  kFlat,  // everyone's small message in everyone's view: flat_exchange.h
};

struct Schedule {
  const char* name = "";
  Fused fused = Fused::kNo;
  std::vector<Step> steps;
  std::vector<Lane> lanes;

  // For planners: append a lane, then its steps.
  void begin_lane(std::uint32_t stage) {
    lanes.push_back({stage, static_cast<std::uint32_t>(steps.size()), 0});
  }
  void add(const Step& step) {
    steps.push_back(step);
    ++lanes.back().count;
  }
};

// What is planned. `count` is elements of one rank's part.
struct PlanRequest {
  OpKind kind = OpKind::kBarrier;
  Rank rank = 0;
  int world_size = 1;
  Rank root = 0;
  std::uint64_t count = 0;
  std::uint64_t element_bytes = 1;
  std::uint64_t chunk_bytes = 256 * 1024;
  // Every element is folded in the order of the ranks with one rounding at the end, wherever in the
  // tensor it lies.
  bool in_rank_order = false;
  const Splits* splits = nullptr;  // of an uneven all_to_all
};

// One family of planners a file. Each is total: any world size from 1, any count from 0.
Schedule plan_ring_all_reduce(const PlanRequest& request);
Schedule plan_ring_all_gather(const PlanRequest& request);
Schedule plan_recursive_all_reduce(const PlanRequest& request);  // recursive doubling
Schedule plan_tree_broadcast(const PlanRequest& request);        // binomial
Schedule plan_barrier(const PlanRequest& request);               // dissemination
// Every rank deals with every other directly.
Schedule plan_swap_all_reduce(const PlanRequest& request);    // everything to everyone
Schedule plan_direct_all_reduce(const PlanRequest& request);  // a part each, then all of them
Schedule plan_direct_reduce_scatter(const PlanRequest& request);
Schedule plan_direct_reduce(const PlanRequest& request);     // all of it at the root
Schedule plan_scattered_reduce(const PlanRequest& request);  // a part each, then to the root
Schedule plan_direct_all_gather(const PlanRequest& request);
Schedule plan_direct_broadcast(const PlanRequest& request);
Schedule plan_direct_gather(const PlanRequest& request);
Schedule plan_direct_scatter(const PlanRequest& request);
Schedule plan_direct_all_to_all(const PlanRequest& request);  // even or uneven
// Expansions of fused steps.
Schedule plan_flat(const PlanRequest& request);

// The i-th of n nearly equal parts of `count`, cut at multiples of `align` elements.
struct Part {
  std::uint64_t offset;
  std::uint64_t count;
};
Part part_of(std::uint64_t count, int n, int i, std::uint64_t align = 1);

}  // namespace pycomm::collectives
