// The core alone: an all_reduce of two pinned ranks in C++, through Communicator::run.
#pragma once

#include <cstdint>

namespace pycomm::bench {

struct Latency {
  double p50_s = 0;  // of means of 100 operations
  double p99_s = 0;  // of single operations
};

// float32 sums of `bytes`. Zeros if the ranks could not be made.
Latency core_all_reduce_latency(std::uint64_t bytes);

}  // namespace pycomm::bench
