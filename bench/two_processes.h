// Two pinned processes that share one anonymous mapping, for measurements without a library.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

namespace pycomm::bench {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start);
double median(std::vector<double> values);
// Restricts this thread to the index-th allowed processor.
void pin(int index);
void pause_cpu();

// Anonymous memory that a forked child shares.
struct Shared {
  explicit Shared(std::uint64_t size);
  ~Shared();
  Shared(const Shared&) = delete;
  char* data;
  std::uint64_t bytes;
};

struct Flags {
  alignas(128) std::atomic<std::uint64_t> word[2][16];  // word[i][0]: two lines apart
  alignas(128) double result[2];
  alignas(128) pid_t pids[2];
  std::uintptr_t address[2];

  void exchange(int me, std::uint64_t round) {
    word[me][0].store(round, std::memory_order_release);
    while (word[1 - me][0].load(std::memory_order_acquire) < round) pause_cpu();
  }
};

// Runs body(me, flags) in two pinned processes and returns the slower one's result.
double in_two(const std::function<double(int, Flags&)>& body);

}  // namespace pycomm::bench
