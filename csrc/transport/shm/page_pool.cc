#include "transport/shm/page_pool.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace pycomm::transport::shm {

std::optional<std::uint64_t> PageAllocator::allocate(std::uint64_t bytes) {
  bytes = round_to_pages(bytes);
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

bool Budget::take(std::uint64_t bytes) {
  std::uint64_t used = used_.load();
  do {
    const std::uint64_t most = bytes_max_.load();
    if (used > most || bytes > most - used) return false;
  } while (!used_.compare_exchange_weak(used, used + bytes));
  return true;
}

Status Budget::refusal(std::uint64_t bytes) const {
  return Status::error(StatusCode::kSystem,
                       std::to_string(bytes) +
                           " more bytes of shared memory would be above PYCOMM_SHM_BYTES_MAX=" +
                           std::to_string(bytes_max_.load()) + " (" + std::to_string(used_.load()) +
                           " are in use); raise it, or set PYCOMM_SHM_DISABLE=1 to use TCP");
}

Result<std::byte*> PagePool::allocate(std::uint64_t bytes) {
  const auto offset = pages_.allocate(bytes);
  if (!offset) {
    return Status::error(StatusCode::kSystem,
                         "no room for " + std::to_string(bytes) + " bytes of shared memory");
  }
  const std::uint64_t size = pages_.size_at(*offset);
  if (!budget_->take(size)) {
    pages_.free(*offset);
    return budget_->refusal(size);
  }
  std::byte* data = memory_.data() + *offset;
  if (Status status = memory_.commit(*offset, size); !status.is_ok()) {
    free(data);
    return status;
  }
  return data;
}

void PagePool::free(std::byte* data) {
  const std::uint64_t bytes = size_of(data);
  PYCOMM_CHECK(bytes > 0);
  memory_.release(offset_of(data), bytes);
  pages_.free(offset_of(data));
  budget_->give_back(bytes);
}

}  // namespace pycomm::transport::shm
