// How fast a session may send. Two answers: CUBIC (RFC 9438), which takes loss for congestion, and
// BBR (draft-ietf-ccwg-bbr), which measures the path's bandwidth and round trip. Sans-IO.
#pragma once

#include <cstdint>
#include <memory>

#include "base/clock.h"

namespace pycomm::transport::quic {

enum class CongestionKind : std::uint8_t { kBbr, kCubic };

// What one acknowledgement taught (draft-cheng-iccrg-delivery-rate-estimation section 3).
struct RateSample {
  std::uint64_t delivered_bytes = 0;  // over interval_ns
  std::int64_t interval_ns = 0;       // 0: no valid sample
  std::uint64_t prior_delivered = 0;  // total delivered when the newest acked packet was sent
  std::uint64_t newly_acked_bytes = 0;
  std::uint64_t newly_lost_bytes = 0;
  std::uint64_t tx_in_flight = 0;  // in flight when that packet was sent
  bool is_app_limited = false;
  std::uint64_t total_delivered = 0;
  std::uint64_t num_marked = 0;  // new Congestion Experienced marks
  base::TimeNs rtt_ns = 0;       // of this acknowledgement, 0: none
  base::TimeNs largest_lost_sent_at = 0;
};

class CongestionControl {
 public:
  virtual ~CongestionControl() = default;

  virtual void on_sent(base::TimeNs now, std::uint64_t in_flight, bool is_app_limited) = 0;
  // `in_flight` is what is left. Also called with losses alone.
  virtual void on_sample(const RateSample& sample, std::uint64_t in_flight, base::TimeNs now) = 0;
  virtual void on_persistent_congestion() = 0;
  virtual void set_mtu(std::uint64_t bytes) = 0;

  virtual std::uint64_t window_bytes() const = 0;
  virtual double pacing_bytes_per_s() const = 0;  // 0: not paced yet
  virtual double bandwidth_bytes_per_s() const = 0;
  virtual const char* name() const = 0;
};

std::unique_ptr<CongestionControl> make_congestion_control(CongestionKind kind,
                                                           std::uint64_t mtu_bytes,
                                                           std::uint64_t seed);
std::unique_ptr<CongestionControl> make_cubic(std::uint64_t mtu_bytes);
std::unique_ptr<CongestionControl> make_bbr(std::uint64_t mtu_bytes, std::uint64_t seed);

inline constexpr std::uint64_t kInitialPackets = 10;  // RFC 9002 section 7.2

}  // namespace pycomm::transport::quic
