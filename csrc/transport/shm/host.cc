#include "transport/shm/host.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace pycomm::transport::shm {
namespace {

// Address space for tensors; pages come as they are allocated.
constexpr std::uint64_t kArenaBytes = std::uint64_t{64} << 30;

}  // namespace

std::optional<std::uint64_t> PageAllocator::allocate(std::uint64_t bytes) {
  if (bytes > UINT64_MAX - kPageBytes) return std::nullopt;
  bytes = std::max((bytes + kPageBytes - 1) / kPageBytes * kPageBytes, kPageBytes);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [first, end] = *it;
    if (end - first < bytes) continue;
    free_.erase(it);
    if (end - first > bytes) free_[first + bytes] = end;
    used_[first] = bytes;
    return first;
  }
  return std::nullopt;
}

std::uint64_t PageAllocator::size_at(std::uint64_t offset) const {
  const auto it = used_.find(offset);
  return it == used_.end() ? 0 : it->second;
}

std::uint64_t PageAllocator::free(std::uint64_t offset) {
  const auto it = used_.find(offset);
  if (it == used_.end()) return 0;
  const std::uint64_t bytes = it->second;
  used_.erase(it);
  std::uint64_t first = offset;
  std::uint64_t end = offset + bytes;
  auto next = free_.lower_bound(first);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->second == first) {
      first = before->first;
      free_.erase(before);
    }
  }
  if (next != free_.end() && next->first == end) {
    end = next->second;
    free_.erase(next);
  }
  free_[first] = end;
  return bytes;
}

Result<std::unique_ptr<Host>> Host::create(std::uint64_t bytes_max) {
  std::unique_ptr<Host> host(new Host());
  host->bytes_max_ = bytes_max;
  auto segment = platform::SealedMemory::create("pycomm-segment", kSegmentBytes);
  if (!segment.is_ok()) return segment.status();
  host->segment_ = std::move(segment).value();
  PYCOMM_RETURN_IF_ERROR(host->segment_.commit(0, kPageBytes));
  auto arena = platform::SealedMemory::create("pycomm-arena", kArenaBytes);
  if (!arena.is_ok()) return arena.status();
  host->arena_ = std::move(arena).value();
  auto bell = platform::Doorbell::create();
  if (!bell.is_ok()) return bell.status();
  host->doorbell_ = std::move(bell).value();
  host->segment_pages_ = PageAllocator(kPageBytes, kSegmentBytes);
  host->arena_pages_ = PageAllocator(0, kArenaBytes);
  host->header().magic = kSegmentMagic;
  return host;
}

Result<std::byte*> Host::allocate(platform::SealedMemory& memory, PageAllocator& pages,
                                  std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  const auto offset = pages.allocate(bytes);
  if (!offset) {
    return Status::error(StatusCode::kSystem,
                         "no room for " + std::to_string(bytes) + " bytes of shared memory");
  }
  const std::uint64_t size = pages.size_at(*offset);
  if (size > bytes_max_ - bytes_used_) {
    pages.free(*offset);
    return Status::error(StatusCode::kSystem,
                         std::to_string(size) +
                             " more bytes of shared memory would be above "
                             "PYCOMM_SHM_BYTES_MAX=" +
                             std::to_string(bytes_max_) + " (" + std::to_string(bytes_used_) +
                             " are in use); raise it, or set PYCOMM_SHM_DISABLE=1 to use TCP");
  }
  if (Status status = memory.commit(*offset, pages.size_at(*offset)); !status.is_ok()) {
    memory.release(*offset, pages.size_at(*offset));
    pages.free(*offset);
    return status;
  }
  bytes_used_ += size;
  return memory.data() + *offset;
}

void Host::free(platform::SealedMemory& memory, PageAllocator& pages, std::byte* data) {
  std::lock_guard lock(mutex_);
  const auto offset = static_cast<std::uint64_t>(data - memory.data());
  const std::uint64_t bytes = pages.size_at(offset);
  PYCOMM_CHECK(bytes > 0);
  memory.release(offset, bytes);
  pages.free(offset);
  bytes_used_ -= bytes;
}

Result<std::byte*> Host::allocate_segment(std::uint64_t bytes) {
  return allocate(segment_, segment_pages_, bytes);
}
void Host::free_segment(std::byte* data) { free(segment_, segment_pages_, data); }
Result<std::byte*> Host::allocate_arena(std::uint64_t bytes) {
  return allocate(arena_, arena_pages_, bytes);
}
void Host::free_arena(std::byte* data) { free(arena_, arena_pages_, data); }

}  // namespace pycomm::transport::shm
