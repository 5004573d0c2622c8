// Memory for tensors that the ranks of a host share: one sealed mapping a process, handed out by
// the page, which peers map to read and write.
//
// Freed blocks are kept for a while, since a training step asks for the same sizes again and again
// and fresh pages cost more than the work on them; then they go back to the system.
// Thread: any.
#pragma once

#include <list>
#include <memory>
#include <mutex>

#include "base/clock.h"
#include "transport/shm/page_pool.h"

namespace pycomm::transport::shm {

// How long freed memory waits for who asks again.
inline constexpr base::TimeNs kKeptNs = 2'000'000'000;

class Arena {
 public:
  // Errors: kSystem with the facility that was refused.
  static Result<std::shared_ptr<Arena>> create(std::shared_ptr<Budget> budget);

  // Whole pages; zeros if asked for, else with whatever they held. Errors: kSystem.
  enum class Contents { kZeros, kAny };
  Result<std::byte*> allocate(std::uint64_t bytes, Contents contents);
  void free(std::byte* data);
  // Gives back to the system what nobody asked for since `before`.
  void trim(base::TimeNs before);

  const platform::SealedMemory& memory() const { return pages_.memory(); }
  std::uint64_t kept_bytes() const;

 private:
  struct Kept {
    std::byte* data;
    std::uint64_t bytes;
    base::TimeNs since;
  };

  Arena() = default;
  // Needs mutex_.
  void release_oldest();

  mutable std::mutex mutex_;
  PagePool pages_;
  std::list<Kept> kept_;  // oldest first
  std::uint64_t kept_bytes_ = 0;
};

}  // namespace pycomm::transport::shm
