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

}  // namespace

Result<std::shared_ptr<Arena>> Arena::create(std::shared_ptr<Budget> budget) {
  std::shared_ptr<Arena> arena(new Arena());
  // A forked child may read what its parent made, as it may read the rest of its memory.
  auto memory =
      platform::SealedMemory::create("pycomm-arena", kArenaBytes, platform::InForks::kStaysMapped);
  if (!memory.is_ok()) return memory.status();
  arena->pages_ = PagePool(std::move(memory).value(), 0, std::move(budget));
  return arena;
}

Result<std::byte*> Arena::allocate(std::uint64_t bytes, Contents contents) {
  std::unique_lock lock(mutex_);
  const std::uint64_t pages_bytes = round_to_pages(bytes);
  const auto found = std::find_if(kept_.begin(), kept_.end(),
                                  [&](const Kept& block) { return block.bytes == pages_bytes; });
  if (found != kept_.end()) {
    std::byte* data = found->data;
    kept_bytes_ -= found->bytes;
    kept_.erase(found);
    lock.unlock();
    if (contents == Contents::kZeros) std::memset(data, 0, pages_bytes);
    return data;
  }
  auto fresh = pages_.allocate(bytes);
  if (fresh.is_ok() || kept_.empty()) return fresh;
  while (!kept_.empty()) release_oldest();  // what is kept may be what is missing
  return pages_.allocate(bytes);
}

void Arena::free(std::byte* data) {
  const base::TimeNs now = platform::real_clock().now_ns();
  std::lock_guard lock(mutex_);
  const std::uint64_t bytes = pages_.size_of(data);
  PYCOMM_CHECK(bytes > 0);
  kept_.push_back({data, bytes, now});
  kept_bytes_ += bytes;
  while (!kept_.empty() && (kept_bytes_ > kKeptBytesMax || kept_.front().since < now - kKeptNs)) {
    release_oldest();
  }
}

void Arena::release_oldest() {
  kept_bytes_ -= kept_.front().bytes;
  pages_.free(kept_.front().data);
  kept_.pop_front();
}

void Arena::trim(base::TimeNs before) {
  std::lock_guard lock(mutex_);
  while (!kept_.empty() && kept_.front().since < before) release_oldest();
}

std::uint64_t Arena::kept_bytes() const {
  std::lock_guard lock(mutex_);
  return kept_bytes_;
}

}  // namespace pycomm::transport::shm
