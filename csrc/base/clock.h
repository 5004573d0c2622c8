// Time as an argument. Only platform/ reads a real clock; the simulator brings a virtual one.
#pragma once

#include <cstdint>

namespace pycomm::base {

// Nanoseconds on some monotonic clock.
using TimeNs = std::int64_t;
inline constexpr TimeNs kNever = INT64_MAX;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimeNs now_ns() const = 0;
};

constexpr TimeNs ms_to_ns(std::int64_t ms) { return ms * 1'000'000; }

// now + timeout without overflow; a negative timeout means "never".
constexpr TimeNs deadline_after(TimeNs now, std::int64_t timeout_ms) {
  if (timeout_ms < 0 || timeout_ms > (kNever - now) / 1'000'000) return kNever;
  return now + ms_to_ns(timeout_ms);
}

}  // namespace pycomm::base
