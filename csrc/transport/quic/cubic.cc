// CUBIC, RFC 9438, with HyStart-like exit from slow start on delay (RFC 9406's threshold).
#include <algorithm>
#include <cmath>

#include "transport/quic/congestion.h"

namespace pycomm::transport::quic {
namespace {

constexpr double kBeta = 0.7;
constexpr double kC = 0.4;  // packets a second cubed
constexpr std::uint64_t kMinPackets = 2;
constexpr double kSlowStartGain = 2, kPacingGain = 1.25;  // RFC 9002 section 7.7
constexpr base::TimeNs kThresholdMinNs = 4'000'000, kThresholdMaxNs = 16'000'000;

class Cubic final : public CongestionControl {
 public:
  explicit Cubic(std::uint64_t mtu) : mtu_(mtu), window_(kInitialPackets * mtu) {}

  void on_sent(base::TimeNs, std::uint64_t, bool is_app_limited) override {
    is_app_limited_ = is_app_limited;
  }

  void on_sample(const RateSample& s, std::uint64_t, base::TimeNs now) override {
    if (s.rtt_ns > 0) {
      min_rtt_ = min_rtt_ == 0 ? s.rtt_ns : std::min(min_rtt_, s.rtt_ns);
      rtt_ = rtt_ == 0 ? s.rtt_ns : (7 * rtt_ + s.rtt_ns) / 8;
    }
    if (s.interval_ns > 0)
      rate_ = 1e9 * static_cast<double>(s.delivered_bytes) / static_cast<double>(s.interval_ns);
    if (s.newly_lost_bytes > 0 && s.largest_lost_sent_at > recovery_started_) return reduce(now);
    if (s.num_marked > 0 && now - recovery_started_ > rtt_) return reduce(now);
    if (s.newly_acked_bytes == 0 || is_app_limited_) return;
    if (window_ < threshold_) {
      window_ += s.newly_acked_bytes;
      const base::TimeNs slack = std::clamp(min_rtt_ / 8, kThresholdMinNs, kThresholdMaxNs);
      if (rtt_ > min_rtt_ + slack) threshold_ = window_;
      return;
    }
    grow(s.newly_acked_bytes, now);
  }

  void on_persistent_congestion() override {
    window_ = kMinPackets * mtu_;
    epoch_ = 0;
  }
  void set_mtu(std::uint64_t bytes) override { mtu_ = bytes; }
  std::uint64_t window_bytes() const override { return window_; }
  double pacing_bytes_per_s() const override {
    if (rtt_ == 0) return 0;
    const double gain = window_ < threshold_ ? kSlowStartGain : kPacingGain;
    return gain * 1e9 * static_cast<double>(window_) / static_cast<double>(rtt_);
  }
  double bandwidth_bytes_per_s() const override { return rate_; }
  const char* name() const override { return "cubic"; }

 private:
  double packets() const { return static_cast<double>(window_) / static_cast<double>(mtu_); }

  void reduce(base::TimeNs now) {
    recovery_started_ = now;
    const double w = packets();
    // Fast convergence: leave room for who comes.
    w_max_ = w < w_max_ ? w * (1 + kBeta) / 2 : w;
    window_ = std::max(static_cast<std::uint64_t>(static_cast<double>(window_) * kBeta),
                       kMinPackets * mtu_);
    threshold_ = window_;
    epoch_ = 0;
  }

  void grow(std::uint64_t acked, base::TimeNs now) {
    if (epoch_ == 0) {
      epoch_ = now;
      w_max_ = std::max(w_max_, packets());
      k_ = std::cbrt((w_max_ - packets()) / kC);
      w_est_ = packets();
    }
    const double t = static_cast<double>(now - epoch_ + rtt_) / 1e9;
    const double target = std::clamp(kC * std::pow(t - k_, 3) + w_max_, packets(), 1.5 * packets());
    const double acked_packets = static_cast<double>(acked) / static_cast<double>(mtu_);
    w_est_ += 3 * (1 - kBeta) / (1 + kBeta) * acked_packets / packets();
    const double next =
        std::max(packets() + (target - packets()) / packets() * acked_packets, w_est_);
    window_ = static_cast<std::uint64_t>(next * static_cast<double>(mtu_));
  }

  std::uint64_t mtu_;
  std::uint64_t window_;
  std::uint64_t threshold_ = UINT64_MAX;
  double w_max_ = 0, w_est_ = 0, k_ = 0, rate_ = 0;
  base::TimeNs epoch_ = 0, recovery_started_ = -1, rtt_ = 0, min_rtt_ = 0;
  bool is_app_limited_ = false;
};

}  // namespace

std::unique_ptr<CongestionControl> make_cubic(std::uint64_t mtu) {
  return std::make_unique<Cubic>(mtu);
}

std::unique_ptr<CongestionControl> make_congestion_control(CongestionKind kind, std::uint64_t mtu,
                                                           std::uint64_t seed) {
  return kind == CongestionKind::kCubic ? make_cubic(mtu) : make_bbr(mtu, seed);
}

}  // namespace pycomm::transport::quic
