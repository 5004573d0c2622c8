// Proves a set of schedules, one per rank, by running them on symbols: every input is reduced
// exactly once and with its own kind, every output is complete, every rank holds the same
// expression (so the same bits), and the one in rank order where that is asked for; every message
// has exactly one sender and one receiver of one size, nothing deadlocks, and lanes that run
// together do not touch each other's memory.
#pragma once

#include <vector>

#include "collectives/schedule.h"

namespace pycomm::collectives {

inline constexpr int kCheckerWorldMax = 64;

// `schedules[r]` is rank r's, for requests that differ in the rank only. With `in_place`, input and
// output overlap where operation.h allows it. Returns ok or the first violation in words.
Status check_schedules(const std::vector<Schedule>& schedules, const PlanRequest& request,
                       bool in_place = false);
// For an uneven all_to_all: splits[r] is rank r's.
Status check_schedules(const std::vector<Schedule>& schedules, const PlanRequest& request,
                       const std::vector<Splits>& splits);

}  // namespace pycomm::collectives
