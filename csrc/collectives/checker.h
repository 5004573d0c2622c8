// Proves a set of schedules, one per rank, by running them on symbols: every input is reduced
// exactly once, every output is complete, every rank holds the same expression (so the same bits),
// every message has exactly one sender and one receiver of one size, nothing deadlocks, and lanes
// that run together do not touch each other's memory.
#pragma once

#include <vector>

#include "collectives/schedule.h"

namespace pycomm::collectives {

inline constexpr int kCheckerWorldMax = 64;

// `schedules[r]` is rank r's, for requests that differ in the rank only. Returns ok or the first
// violation in words.
Status check_schedules(const std::vector<Schedule>& schedules, const PlanRequest& request);

}  // namespace pycomm::collectives
