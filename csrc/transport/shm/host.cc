#include "transport/shm/host.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace pycomm::transport::shm {

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

Result<std::unique_ptr<Host>> Host::create(std::shared_ptr<Budget> budget,
                                           std::shared_ptr<Arena> arena) {
  std::unique_ptr<Host> host(new Host());
  host->budget_ = std::move(budget);
  host->arena_ = std::move(arena);
  auto segment = platform::SealedMemory::create("pycomm-segment", kSegmentBytes);
  if (!segment.is_ok()) return segment.status();
  host->segment_ = std::move(segment).value();
  PYCOMM_RETURN_IF_ERROR(host->segment_.commit(0, kPageBytes));
  auto bell = platform::Doorbell::create();
  if (!bell.is_ok()) return bell.status();
  host->doorbell_ = std::move(bell).value();
  host->segment_pages_ = PageAllocator(kPageBytes, kSegmentBytes);
  host->header().magic = kSegmentMagic;
  return host;
}

Result<std::byte*> Host::allocate_segment(std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  const auto offset = segment_pages_.allocate(bytes);
  if (!offset) {
    return Status::error(StatusCode::kSystem,
                         "no room for " + std::to_string(bytes) + " bytes of shared memory");
  }
  const std::uint64_t size = segment_pages_.size_at(*offset);
  if (!budget_->take(size)) {
    segment_pages_.free(*offset);
    return budget_->refusal(size);
  }
  if (Status status = segment_.commit(*offset, size); !status.is_ok()) {
    segment_.release(*offset, size);
    segment_pages_.free(*offset);
    budget_->give_back(size);
    return status;
  }
  return segment_.data() + *offset;
}

void Host::free_segment(std::byte* data) {
  std::lock_guard lock(mutex_);
  const auto offset = static_cast<std::uint64_t>(data - segment_.data());
  const std::uint64_t bytes = segment_pages_.size_at(offset);
  PYCOMM_CHECK(bytes > 0);
  segment_.release(offset, bytes);
  segment_pages_.free(offset);
  budget_->give_back(bytes);
}

}  // namespace pycomm::transport::shm
