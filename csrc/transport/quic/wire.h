// Reading and writing QUIC's bytes: variable-length integers (RFC 9000 section 16), fixed ones and
// spans. A Reader that ran over its end stays failed, so that callers ask once, at the end.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>

namespace pycomm::transport::quic {

inline constexpr std::uint64_t kVarintMax = (std::uint64_t{1} << 62) - 1;

constexpr std::size_t varint_bytes(std::uint64_t value) {
  return value < 64 ? 1 : value < 16'384 ? 2 : value < 1'073'741'824 ? 4 : 8;
}

class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  bool failed() const { return failed_; }
  std::size_t left() const { return bytes_.size() - at_; }
  std::size_t position() const { return at_; }

  std::uint64_t fixed(std::size_t count) {
    std::uint64_t value = 0;
    for (const std::uint8_t byte : span(count)) value = value << 8 | byte;
    return value;
  }
  std::uint64_t varint() {
    if (left() == 0) return fail();
    const std::size_t count = std::size_t{1} << (bytes_[at_] >> 6);
    const std::uint64_t value = fixed(count);
    return value & (UINT64_MAX >> (66 - 8 * count));
  }
  std::span<const std::uint8_t> span(std::uint64_t count) {
    if (failed_ || count > left()) {
      fail();
      return {};
    }
    const auto result = bytes_.subspan(at_, count);
    at_ += count;
    return result;
  }

 private:
  std::uint64_t fail() {
    failed_ = true;
    at_ = bytes_.size();
    return 0;
  }

  std::span<const std::uint8_t> bytes_;
  std::size_t at_ = 0;
  bool failed_ = false;
};

// The caller has looked that there is room.
class Writer {
 public:
  explicit Writer(std::span<std::uint8_t> room) : room_(room) {}

  std::size_t size() const { return at_; }
  std::size_t left() const { return room_.size() - at_; }

  void fixed(std::uint64_t value, std::size_t count) {
    for (std::size_t i = count; i-- > 0; value >>= 8) {
      room_[at_ + i] = static_cast<std::uint8_t>(value);
    }
    at_ += count;
  }
  void varint(std::uint64_t value) { varint(value, varint_bytes(value)); }
  // In `count` bytes, at least varint_bytes(value).
  void varint(std::uint64_t value, std::size_t count) {
    const std::uint64_t log = count == 1 ? 0 : count == 2 ? 1 : count == 4 ? 2 : 3;
    fixed(value | log << (8 * count - 2), count);
  }
  void span(std::span<const std::uint8_t> bytes) {
    if (!bytes.empty()) std::memcpy(room_.data() + at_, bytes.data(), bytes.size());
    at_ += bytes.size();
  }
  void fill(std::uint8_t byte, std::size_t count) {
    std::memset(room_.data() + at_, byte, count);
    at_ += count;
  }

 private:
  std::span<std::uint8_t> room_;
  std::size_t at_ = 0;
};

}  // namespace pycomm::transport::quic
