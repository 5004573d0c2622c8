// Pages of one sealed mapping, handed out within the process's budget. Not locked: its owner is.
#pragma once

#include <atomic>
#include <memory>

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
  void set_bytes_max(std::uint64_t bytes_max) { bytes_max_ = bytes_max; }
  // kSystem, with what to do.
  Status refusal(std::uint64_t bytes) const;

 private:
  std::atomic<std::uint64_t> bytes_max_;
  std::atomic<std::uint64_t> used_{0};
};

class PagePool {
 public:
  PagePool() = default;
  // Of [first, end) of `memory`.
  PagePool(platform::SealedMemory memory, std::uint64_t first, std::shared_ptr<Budget> budget)
      : memory_(std::move(memory)), pages_(first, memory_.bytes()), budget_(std::move(budget)) {}

  // Whole zeroed pages. Errors: kSystem.
  Result<std::byte*> allocate(std::uint64_t bytes);
  // Returns them to the system.
  void free(std::byte* data);
  std::uint64_t size_of(const std::byte* data) const { return pages_.size_at(offset_of(data)); }
  const platform::SealedMemory& memory() const { return memory_; }

 private:
  std::uint64_t offset_of(const std::byte* data) const {
    return static_cast<std::uint64_t>(data - memory_.data());
  }

  platform::SealedMemory memory_;
  PageAllocator pages_;
  std::shared_ptr<Budget> budget_;
};

}  // namespace pycomm::transport::shm
