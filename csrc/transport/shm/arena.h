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
#include "platform/memory.h"
#include "transport/shm/page_allocator.h"

namespace pycomm::transport::shm {

// Shared memory of this process, in bytes. Thread: any.
class Budget {
 public:
  explicit Budget(std::uint64_t bytes_max) : bytes_max_(bytes_max) {}
  // False if it would be more than the most.
  bool take(std::uint64_t bytes);
  void give_back(std::uint64_t bytes) { used_.fetch_sub(bytes); }
  std::uint64_t used() const { return used_.load(); }
  std::uint64_t bytes_max() const { return bytes_max_.load(); }
  void set_bytes_max(std::uint64_t bytes_max) { bytes_max_ = bytes_max; }
  // kSystem, with what to do.
  Status refusal(std::uint64_t bytes) const;

 private:
  std::atomic<std::uint64_t> bytes_max_;
  std::atomic<std::uint64_t> used_{0};
};

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

  const platform::SealedMemory& memory() const { return memory_; }
  std::uint64_t kept_bytes() const;

 private:
  struct Kept {
    std::uint64_t offset;
    std::uint64_t bytes;
    base::TimeNs since;
  };

  Arena() = default;
  Result<std::byte*> allocate_fresh(std::uint64_t bytes);
  void release(const Kept& block);

  std::shared_ptr<Budget> budget_;
  platform::SealedMemory memory_;
  mutable std::mutex mutex_;
  PageAllocator pages_;
  std::list<Kept> kept_;  // oldest first
  std::uint64_t kept_bytes_ = 0;
};

}  // namespace pycomm::transport::shm
