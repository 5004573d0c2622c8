// The shared memory of this process: a segment that it alone writes (rings, flat slots, flags),
// an arena for tensors that peers may also write, and a doorbell.
//
// Thread: allocate and free lock; the rest is constant after create().
#pragma once

#include <memory>
#include <mutex>

#include "platform/memory.h"
#include "platform/poller.h"
#include "transport/shm/layout.h"
#include "transport/shm/page_allocator.h"

namespace pycomm::transport::shm {

class Host {
 public:
  // At most `bytes_max` bytes of memory. Errors: kSystem with the facility that was refused.
  static Result<std::unique_ptr<Host>> create(std::uint64_t bytes_max);

  SegmentHeader& header() { return *reinterpret_cast<SegmentHeader*>(segment_.data()); }
  const platform::SealedMemory& segment() const { return segment_; }
  const platform::SealedMemory& arena() const { return arena_; }
  const platform::Doorbell& doorbell() const { return doorbell_; }

  // Zeroed pages of the segment, for this process to write and peers to read.
  Result<std::byte*> allocate_segment(std::uint64_t bytes);
  void free_segment(std::byte* data);

  // Zeroed pages of the arena, for tensors. Freed pages go back to the system.
  Result<std::byte*> allocate_arena(std::uint64_t bytes);
  void free_arena(std::byte* data);

 private:
  Host() = default;
  Result<std::byte*> allocate(platform::SealedMemory& memory, PageAllocator& pages,
                              std::uint64_t bytes);
  void free(platform::SealedMemory& memory, PageAllocator& pages, std::byte* data);

  platform::SealedMemory segment_;
  platform::SealedMemory arena_;
  platform::Doorbell doorbell_;
  std::mutex mutex_;
  std::uint64_t bytes_max_ = 0;
  std::uint64_t bytes_used_ = 0;
  PageAllocator segment_pages_;
  PageAllocator arena_pages_;
};

}  // namespace pycomm::transport::shm
