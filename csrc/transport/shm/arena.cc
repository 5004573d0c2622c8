#include "transport/shm/arena.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "platform/system.h"

namespace pycomm::transport::shm {
namespace {

// Address space; pages come as they are allocated.
constexpr std::uint64_t kArenaBytes = std::uint64_t{64} << 30;
// Kept for the next one who asks, at most.
constexpr std::uint64_t kKeptBytesMax = std::uint64_t{512} << 20;
constexpr base::TimeNs kKeptNs = 2'000'000'000;

}  // namespace

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

Result<std::shared_ptr<Arena>> Arena::create(std::shared_ptr<Budget> budget) {
  std::shared_ptr<Arena> arena(new Arena());
  arena->budget_ = std::move(budget);
  // A forked child may read what its parent made, as it may read the rest of its memory.
  auto memory =
      platform::SealedMemory::create("pycomm-arena", kArenaBytes, platform::InForks::kStaysMapped);
  if (!memory.is_ok()) return memory.status();
  arena->memory_ = std::move(memory).value();
  arena->pages_ = PageAllocator(0, kArenaBytes);
  return arena;
}

Result<std::byte*> Arena::allocate(std::uint64_t bytes, Contents contents) {
  if (bytes > kArenaBytes) {
    return Status::error(StatusCode::kSystem,
                         "no room for " + std::to_string(bytes) + " bytes of shared memory");
  }
  bytes = std::max((bytes + kPageBytes - 1) / kPageBytes * kPageBytes, kPageBytes);
  {
    std::lock_guard lock(mutex_);
    const auto found = std::find_if(kept_.begin(), kept_.end(),
                                    [&](const Kept& block) { return block.bytes == bytes; });
    if (found != kept_.end()) {
      std::byte* data = memory_.data() + found->offset;
      kept_bytes_ -= found->bytes;
      kept_.erase(found);
      if (contents == Contents::kZeros) std::memset(data, 0, bytes);
      return data;
    }
  }
  auto fresh = allocate_fresh(bytes);
  if (fresh.is_ok()) return fresh;
  trim(base::kNever);  // what is kept may be what is missing
  return allocate_fresh(bytes);
}

Result<std::byte*> Arena::allocate_fresh(std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  const auto offset = pages_.allocate(bytes);
  if (!offset) {
    return Status::error(StatusCode::kSystem,
                         "no room for " + std::to_string(bytes) + " bytes of shared memory");
  }
  if (!budget_->take(bytes)) {
    pages_.free(*offset);
    return budget_->refusal(bytes);
  }
  if (Status status = memory_.commit(*offset, bytes); !status.is_ok()) {
    release({*offset, bytes, 0});
    return status;
  }
  return memory_.data() + *offset;
}

void Arena::free(std::byte* data) {
  const base::TimeNs now = platform::real_clock().now_ns();
  {
    std::lock_guard lock(mutex_);
    const auto offset = static_cast<std::uint64_t>(data - memory_.data());
    const std::uint64_t bytes = pages_.size_at(offset);
    PYCOMM_CHECK(bytes > 0);
    kept_.push_back({offset, bytes, now});
    kept_bytes_ += bytes;
    while (kept_bytes_ > kKeptBytesMax) {
      kept_bytes_ -= kept_.front().bytes;
      release(kept_.front());
      kept_.pop_front();
    }
  }
  trim(now - kKeptNs);
}

void Arena::release(const Kept& block) {
  memory_.release(block.offset, block.bytes);
  pages_.free(block.offset);
  budget_->give_back(block.bytes);
}

void Arena::trim(base::TimeNs before) {
  std::lock_guard lock(mutex_);
  while (!kept_.empty() && kept_.front().since < before) {
    kept_bytes_ -= kept_.front().bytes;
    release(kept_.front());
    kept_.pop_front();
  }
}

std::uint64_t Arena::kept_bytes() const {
  std::lock_guard lock(mutex_);
  return kept_bytes_;
}

}  // namespace pycomm::transport::shm
