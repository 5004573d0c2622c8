// Collectives of two ranks as the barest loops that can be written: what the hardware takes for the
// copies and sums that an operation is, with counters for pace and no library. The benchmarks state
// themselves against these, measured in the same run.
//
// Reviewed: nothing here may be slowed to win. Of every way that is known (through a window with
// cached or with streamed stores, results cached or streamed, the kernel's process_vm_readv) the
// fastest counts.
#pragma once

#include <cstdint>
#include <string>

namespace pycomm::bench {

enum class Pages { kSmall, kHuge };

// Seconds of one `operation` ("all_reduce", ...; float32 sums) on tensors of each rank's own, in
// two pinned processes. `bytes` is the benchmark's size column: all parts together where there are
// several. 0 for an operation that has no bare loop.
double bare_seconds(const std::string& operation, std::uint64_t bytes, Pages pages);

// The same for an all_reduce in place of tensors that both processes map.
double bare_shared_seconds(std::uint64_t bytes);

}  // namespace pycomm::bench
