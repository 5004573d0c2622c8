// Receive buffers of one size, last in first out, so that the next one is warm in the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace pycomm::collectives {

class ScratchPool {
 public:
  using Buffer = std::unique_ptr<std::byte[]>;

  // A buffer of at least `bytes`; all buffers grow to the largest request seen.
  Buffer take(std::uint64_t bytes) {
    if (bytes > buffer_bytes_) {
      free_.clear();
      buffer_bytes_ = bytes;
    }
    if (free_.empty()) return Buffer(new std::byte[buffer_bytes_]);
    Buffer buffer = std::move(free_.back());
    free_.pop_back();
    return buffer;
  }
  // `bytes` as given to take(); a buffer from before the pool grew is let go.
  void give_back(Buffer buffer, std::uint64_t bytes) {
    if (bytes == buffer_bytes_ && free_.size() < kBuffersMax) free_.push_back(std::move(buffer));
  }

 private:
  static constexpr std::size_t kBuffersMax = 16;
  std::uint64_t buffer_bytes_ = 0;
  std::vector<Buffer> free_;
};

}  // namespace pycomm::collectives
