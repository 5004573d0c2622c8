// A schedule: what one rank does in one collective, as flat records. Schedules are functions of
// (kind, rank, world, size) and plain data; the executor runs them over any transport, the checker
// proves a whole set of them, the simulator runs the same objects at sizes no machine here has.
//
// Shape: stages of lanes of steps. The steps of a lane run in order; lanes of a stage run
// concurrently and touch disjoint memory (or only read it); a stage starts when the one before is
// done. Offsets and counts are elements. A message is named (step, chunk) within its operation.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pycomm/types.h"

namespace pycomm::collectives {

enum class StepKind : std::uint8_t {
  kSend,             // output[offset, count) -> peer
  kRecv,             // peer -> buffer[offset, count)
  kRecvCombine,      // output = received op output
  kExchange,         // send to peer and receive from `from`, both output[offset, count)
  kExchangeCombine,  // swap with peer; output = lower rank's op higher rank's
  kFold,   // output = input of rank 0 op rank 1 op ..., others' in scratch, mine in output
  kScale,  // output /= world_size, if the reduction is an average
};

enum class BufferId : std::uint8_t { kOutput, kScratch };

struct Step {
  StepKind kind;
  BufferId buffer = BufferId::kOutput;  // of kRecv
  Rank peer = kNoRank;
  Rank from = kNoRank;     // of kExchange
  std::uint32_t step = 0;  // names the message
  std::uint32_t chunk = 0;
  std::uint64_t offset = 0;
  std::uint64_t count = 0;
  std::uint64_t scratch_stride = 0;  // of kFold: rank p's input is at scratch[p * stride]
};

struct Lane {
  std::uint32_t stage = 0;
  std::uint32_t first = 0;  // into steps
  std::uint32_t count = 0;
};

// How a fused schedule runs as one direct call; its steps are its expansion.
enum class Fused : std::uint8_t {
  kNo,
  kFlat,    // everyone's small message in everyone's view: flat_exchange.h
  kShared,  // tensors that all ranks can write: shared_all_reduce.h
};

struct Schedule {
  const char* name = "";
  Fused fused = Fused::kNo;
  std::vector<Step> steps;
  std::vector<Lane> lanes;
  std::uint64_t scratch_elements = 0;

  // For planners: append a lane, then its steps.
  void begin_lane(std::uint32_t stage) {
    lanes.push_back({stage, static_cast<std::uint32_t>(steps.size()), 0});
  }
  void add(const Step& step) {
    steps.push_back(step);
    ++lanes.back().count;
  }
};

// What is planned. `count` is elements of one rank's contribution.
struct PlanRequest {
  OpKind kind = OpKind::kBarrier;
  Rank rank = 0;
  int world_size = 1;
  Rank root = 0;
  std::uint64_t count = 0;
  std::uint64_t element_bytes = 1;
  std::uint64_t chunk_bytes = 256 * 1024;
};

// One planner a file. Each is total: any world size from 1, any count from 0.
Schedule plan_ring_all_reduce(const PlanRequest& request);
Schedule plan_recursive_all_reduce(const PlanRequest& request);  // recursive doubling
Schedule plan_ring_all_gather(const PlanRequest& request);
Schedule plan_tree_broadcast(const PlanRequest& request);     // binomial
Schedule plan_barrier(const PlanRequest& request);            // dissemination
Schedule plan_flat(const PlanRequest& request);               // expansion of Fused::kFlat
Schedule plan_shared_all_reduce(const PlanRequest& request);  // expansion of Fused::kShared

// The i-th of n nearly equal parts of `count`, cut at multiples of `align` elements.
struct Part {
  std::uint64_t offset;
  std::uint64_t count;
};
Part part_of(std::uint64_t count, int n, int i, std::uint64_t align = 1);

}  // namespace pycomm::collectives
