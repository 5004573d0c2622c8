// What the groups of a process did last, as torch's flight recorder writes it: a pickle that its
// analyser (torchfrtrace, python -m torch.distributed.flight_recorder.fr_trace) reads.
#pragma once

#include <string>
#include <vector>

#include "pycomm/communicator.h"

namespace pycomm::communicator {

struct FlightGroup {
  std::string name;
  std::vector<int> global_ranks;
  std::vector<FlightRecord> records;
};

// The file's contents. Operations of a group are in order; groups follow one another.
std::string encode_flight_dump(const std::vector<FlightGroup>& groups);

}  // namespace pycomm::communicator
