// Whether other threads want this processor: then spinning only keeps a peer from arriving.
// Told by how long a yield takes, so it needs no knowledge of pinning, containers or other jobs.
// Thread: any; a stale answer costs microseconds.
#pragma once

#include <atomic>

#include "platform/system.h"

namespace pycomm::communicator {

class Crowding {
 public:
  bool is_crowded() const { return is_crowded_.load(std::memory_order_relaxed); }

  // Yields once and learns from it. A yield to nobody is a system call of well under a microsecond;
  // one that ran someone else takes at least two context switches.
  void yield() {
    const base::TimeNs start = platform::real_clock().now_ns();
    platform::yield_thread();
    const base::TimeNs spent = platform::real_clock().now_ns() - start;
    if (spent > kOthersRanNs) is_crowded_.store(true, std::memory_order_relaxed);
    if (spent < kNobodyRanNs) is_crowded_.store(false, std::memory_order_relaxed);
  }

 private:
  static constexpr base::TimeNs kOthersRanNs = 4'000;
  static constexpr base::TimeNs kNobodyRanNs = 1'500;
  std::atomic<bool> is_crowded_{false};
};

}  // namespace pycomm::communicator
