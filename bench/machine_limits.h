// What this machine allows, measured by the barest loops that can be written: every ratio in the
// benchmarks is stated against these, in the same run.
//
// Reviewed: nothing here may be slowed to win. Two processes, pinned to the first two allowed
// processors, share one anonymous mapping; buffers are touched first; each figure is the best
// median of several rounds. The bounds of facts known elsewhere are in docs/performance.md.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace pycomm::bench {

struct Limit {
  std::string name;     // "flag exchange", "copy", ...
  std::uint64_t bytes;  // working size; 0 where none applies
  int num_threads;      // processes at work at once
  double value;
  std::string unit;  // "ns", "GB/s"
};

// A symmetric exchange of flags between two pinned processes: each writes a word in its own cache
// line and waits for the other's. Nanoseconds per exchange.
double flag_exchange_ns(int num_rounds);

// Bytes per second of each of two pinned processes while both work, on float32 buffers of `bytes`.
// copy: plain memcpy of own memory. add: a[i] += b[i], own memory, bytes of a. cross_read: reading
// (summing) what the other process has just written. process_vm_readv: both read each other's.
double copy_bytes_per_s(std::uint64_t bytes, int num_processes);
double add_bytes_per_s(std::uint64_t bytes, int num_processes);
double cross_read_bytes_per_s(std::uint64_t bytes);
double process_vm_readv_bytes_per_s(std::uint64_t bytes);

// Two-process all_reduce of `bytes` in memory that both map, each tensor freshly written by its
// owner, between two flag exchanges. Seconds; no library code.
//   kReadOnly  only what no implementation can avoid: each reads its half of both tensors
//   kWhole     the bare loop: each reads its half of both, adds, and writes both
enum class SharedPass { kReadOnly, kWhole };
double shared_all_reduce_s(std::uint64_t bytes, SharedPass pass);

// One TCP stream over loopback, bytes per second, and the 8-byte round trip in ns, either asleep
// between messages or looking all the time.
double tcp_stream_bytes_per_s(std::uint64_t bytes);
enum class Waiting { kAsleep, kBusy };
double tcp_round_trip_ns(Waiting waiting);

// All of the above, and the pipe of udp_pipe.h, at the sizes of the tables; `report` gets each
// figure as it is known.
void measure_limits(const std::function<void(const Limit&)>& report);

}  // namespace pycomm::bench
