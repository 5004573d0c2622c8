// First fit over page-aligned ranges of one mapping; sans-IO. Used for segments and arenas.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace pycomm::transport::shm {

inline constexpr std::uint64_t kPageBytes = 4096;

// At least one page.
constexpr std::uint64_t round_to_pages(std::uint64_t bytes) {
  if (bytes > UINT64_MAX - kPageBytes) return bytes;  // more than there is anywhere
  const std::uint64_t pages = (bytes + kPageBytes - 1) / kPageBytes;
  return (pages > 0 ? pages : 1) * kPageBytes;
}

class PageAllocator {
 public:
  PageAllocator() = default;
  PageAllocator(std::uint64_t first, std::uint64_t end) { free_[first] = end; }

  // An offset, or nothing if no gap is large enough.
  std::optional<std::uint64_t> allocate(std::uint64_t bytes);
  // Returns the size that was allocated at `offset`; 0 if nothing was.
  std::uint64_t free(std::uint64_t offset);
  std::uint64_t size_at(std::uint64_t offset) const;

 private:
  std::map<std::uint64_t, std::uint64_t> free_;  // first -> end, never adjacent
  std::map<std::uint64_t, std::uint64_t> used_;  // first -> bytes
};

}  // namespace pycomm::transport::shm
