// What this process shares with its peers: a segment that it alone writes (rings, slots, windows,
// flags), the process's arena for tensors that peers may also write, and a doorbell.
//
// Thread: allocate and free lock; the rest is constant after create().
#pragma once

#include <memory>
#include <mutex>

#include "platform/poller.h"
#include "transport/shm/arena.h"
#include "transport/shm/layout.h"

namespace pycomm::transport::shm {

class Host {
 public:
  // Errors: kSystem with the facility that was refused.
  static Result<std::unique_ptr<Host>> create(std::shared_ptr<Budget> budget,
                                              std::shared_ptr<Arena> arena);

  SegmentHeader& header() { return *reinterpret_cast<SegmentHeader*>(segment_.memory().data()); }
  const platform::SealedMemory& segment() const { return segment_.memory(); }
  // Gives freed tensors' memory back to the system that nobody wanted again since `before`.
  void trim(base::TimeNs before) { arena_->trim(before); }
  const platform::SealedMemory& arena() const { return arena_->memory(); }
  const platform::Doorbell& doorbell() const { return doorbell_; }

  // Zeroed pages of the segment, for this process to write and peers to read.
  Result<std::byte*> allocate_segment(std::uint64_t bytes);
  void free_segment(std::byte* data);

 private:
  Host() = default;
  std::shared_ptr<Arena> arena_;
  platform::Doorbell doorbell_;
  std::mutex mutex_;
  PagePool segment_;
};

}  // namespace pycomm::transport::shm
