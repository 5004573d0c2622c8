// What ranks of one host tell each other before an operation that does not fit a slot, and the plan
// that follows from it: the same on every rank.
#pragma once

#include <optional>
#include <vector>

#include "collectives/local_run.h"
#include "collectives/select.h"
#include "collectives/tuner.h"

namespace pycomm::collectives {

struct Announcement {
  // Of a tensor: 0 if others cannot reach it; with bit 63, its offset in my arena; else its address
  // here.
  std::uint64_t input = 0;
  std::uint64_t output = 0;
  std::uint64_t window = 0;  // its offset in my segment, plus 1; 0: none
  std::uint32_t pulls = 0;   // 1: this rank can read the others' memory
  std::uint32_t way = 0;     // rank 0's choice for everyone, a Way
};

// Makes the window, where there is none yet.
Announcement make_announcement(LocalChannel& channel, const GroupShape& shape,
                               const OpRequest& request, Rank rank, int world_size);

struct LocalDecision {
  std::optional<LocalPlan> plan;  // or it goes over messages
  std::vector<LocalPeer> peers;   // by rank
  Way way = Way::kStreamedWindow;
  bool is_a_choice = false;  // there were others: what it takes is worth knowing
  bool is_as_announced = true;
  bool is_mapped = false;  // all givers' tensors are
};

// `longest_split`: of an uneven all_to_all, over all pairs. Errors: kInternal if a rank announced
// what it cannot have.
Result<LocalDecision> decide(const LocalChannel& channel, const GroupShape& shape,
                             const OpRequest& request, Rank rank, std::uint64_t longest_split,
                             const std::vector<Announcement>& announced);

}  // namespace pycomm::collectives
