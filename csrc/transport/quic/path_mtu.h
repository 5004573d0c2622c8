// The largest datagram that the path carries: search by padded probes (RFC 8899), and a look out
// for black holes that loss alone does not fool: only several probe timeouts in a row, in which
// every full-sized packet vanished, count.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/clock.h"

namespace pycomm::transport::quic {

class PathMtu {
 public:
  static constexpr std::uint64_t kBase = 1200;  // RFC 9000 section 14
  static constexpr std::uint64_t kStep = 8;     // the search ends within this
  static constexpr int kTriesMax = 3;
  static constexpr int kTimeoutsOfBlackHole = 2;
  static constexpr base::TimeNs kSearchAgainNs = 600'000'000'000;

  void begin(std::uint64_t mtu_max, base::TimeNs now) {
    max_ = std::max(mtu_max, kBase);
    restart(now);
  }
  std::uint64_t current() const { return current_; }
  // Size of the probe that should be sent now, or 0.
  std::uint64_t wanted_probe(base::TimeNs now) {
    if (probing_ != 0) return 0;
    if (high_ < current_ + kStep) {
      if (now < search_again_at_ || current_ >= max_) return 0;
      restart_from_current();
    }
    return next_;
  }
  void on_probe_sent(std::uint64_t bytes) { probing_ = bytes; }
  void on_probe_acked(std::uint64_t bytes, base::TimeNs now) {
    probing_ = 0;
    tries_ = 0;
    current_ = std::max(current_, bytes);
    set_next(now);
  }
  void on_probe_lost(std::uint64_t bytes, base::TimeNs now) {
    probing_ = 0;
    if (++tries_ < kTriesMax) return;
    tries_ = 0;
    high_ = std::min(high_, bytes - 1);
    set_next(now);
  }
  // True if the path carries less than it did: start again from the base.
  bool on_timeouts(int in_a_row, bool is_oldest_full_sized, base::TimeNs now) {
    if (in_a_row < kTimeoutsOfBlackHole || !is_oldest_full_sized || current_ == kBase) return false;
    restart(now);
    return true;
  }

 private:
  void restart(base::TimeNs now) {
    current_ = kBase;
    probing_ = 0;
    tries_ = 0;
    search_again_at_ = now;
    restart_from_current();
  }
  void restart_from_current() {
    high_ = max_;
    next_ = max_;  // most paths carry it
  }
  void set_next(base::TimeNs now) {
    next_ = (current_ + high_ + 1) / 2;
    if (high_ < current_ + kStep) search_again_at_ = now + kSearchAgainNs;
  }

  std::uint64_t max_ = kBase, current_ = kBase, high_ = kBase, next_ = 0, probing_ = 0;
  int tries_ = 0;
  base::TimeNs search_again_at_ = 0;
};

}  // namespace pycomm::transport::quic
