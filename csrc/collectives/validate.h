// Whether a request makes sense, before anything is sent.
#pragma once

#include "pycomm/operation.h"

namespace pycomm::collectives {

// Bytes at input and output, where a rank reads and writes them.
struct Sizes {
  std::uint64_t input;
  std::uint64_t output;
};
Sizes sizes_of(const OpRequest& request, int world_size);

// Errors: kInvalidUsage with what is wrong.
Status validate(const OpRequest& request, Rank rank, int world_size);

}  // namespace pycomm::collectives
