// BBR, after draft-ietf-ccwg-bbr (version 3): a model of the path (bandwidth, round trip, how much
// in flight it bears) and a cycle of probing it.
//
// One deviation: the short-term lower bounds react to a round whose loss exceeds kLossThreshold,
// not to any loss. Otherwise a path that drops one packet in a hundred, whatever we do, takes one
// hundredth of the rate away in every round between two probes.
#include <algorithm>
#include <array>
#include <cmath>

#include "base/rng.h"
#include "transport/quic/congestion.h"

namespace pycomm::transport::quic {
namespace {

using base::TimeNs;

constexpr double kStartupPacingGain = 2.77, kStartupWindowGain = 2;
constexpr double kDrainPacingGain = 0.5;
constexpr double kWindowGain = 2, kUpWindowGain = 2.25;
constexpr double kUpPacingGain = 1.25, kDownPacingGain = 0.9;
constexpr double kProbeRttWindowGain = 0.5;
constexpr double kPacingMargin = 0.99;
constexpr double kLossThreshold = 0.02, kBeta = 0.7, kHeadroom = 0.15;
constexpr double kFullBandwidthGrowth = 1.25;
constexpr int kFullBandwidthRounds = 3;
constexpr TimeNs kMinRttFilterNs = 10'000'000'000, kProbeRttIntervalNs = 5'000'000'000;
constexpr TimeNs kProbeRttNs = 200'000'000;
constexpr TimeNs kProbeWaitNs = 2'000'000'000, kProbeWaitSpreadNs = 1'000'000'000;
constexpr std::uint64_t kMinPackets = 4;
constexpr std::uint64_t kUnknown = UINT64_MAX;
constexpr std::uint64_t kExtraAckedRounds = 10;

class Bbr final : public CongestionControl {
 public:
  Bbr(std::uint64_t mtu, std::uint64_t seed)
      : mtu_(mtu), window_(kInitialPackets * mtu), rng_(seed) {}

  void on_sent(TimeNs now, std::uint64_t in_flight, bool is_app_limited) override {
    if (in_flight == 0 && is_app_limited) {  // restarts from idle
      extra_started_ = now;
      extra_delivered_ = 0;
      is_restarting_ = true;
    }
  }

  void on_sample(const RateSample& s, std::uint64_t in_flight, TimeNs now) override {
    in_flight_ = in_flight;
    update_round(s);
    update_bandwidth(s);
    adapt_upper_bounds(s, now);
    update_extra_acked(s, now);
    check_startup(s);
    update_min_rtt(s, now);
    move_cycle(s, now);
    check_probe_rtt(now);
    if (round_started_) {
      lost_in_round_ = 0;
      delivered_in_round_ = 0;
      round_in_flight_ = 0;
    }
    set_pacing();
    set_window(s);
  }

  void on_persistent_congestion() override {
    prior_window_ = std::max(prior_window_, window_);
    window_ = kMinPackets * mtu_;
  }
  void set_mtu(std::uint64_t bytes) override { mtu_ = bytes; }
  std::uint64_t window_bytes() const override { return window_; }
  double pacing_bytes_per_s() const override { return pacing_; }
  double bandwidth_bytes_per_s() const override { return bandwidth(); }
  const char* name() const override { return "bbr"; }

 private:
  enum class State { kStartup, kDrain, kDown, kCruise, kRefill, kUp, kProbeRtt };

  double max_bandwidth() const { return std::max(filter_[0], filter_[1]); }
  double bandwidth() const { return std::min(max_bandwidth(), low_bandwidth_); }
  std::uint64_t bdp(double gain) const {
    if (min_rtt_ == 0) return kInitialPackets * mtu_;
    return static_cast<std::uint64_t>(gain * bandwidth() * static_cast<double>(min_rtt_) / 1e9);
  }
  std::uint64_t target_in_flight() const {
    return std::min(std::max(bdp(1), kMinPackets * mtu_), window_);
  }
  std::uint64_t with_headroom() const {
    if (high_in_flight_ == kUnknown) return kUnknown;
    const auto room = std::max(
        mtu_, static_cast<std::uint64_t>(kHeadroom * static_cast<double>(high_in_flight_)));
    return std::max(high_in_flight_ > room ? high_in_flight_ - room : 0, kMinPackets * mtu_);
  }
  bool is_probing() const {
    return state_ == State::kStartup || state_ == State::kRefill || state_ == State::kUp;
  }

  void update_round(const RateSample& s) {
    round_started_ = s.newly_acked_bytes > 0 && s.prior_delivered >= next_round_delivered_;
    if (round_started_) {
      next_round_delivered_ = s.total_delivered;
      ++num_rounds_;
      is_restarting_ = false;
    }
  }

  void update_bandwidth(const RateSample& s) {
    lost_in_round_ += s.newly_lost_bytes;
    delivered_in_round_ += s.newly_acked_bytes;
    round_in_flight_ = std::max(round_in_flight_, s.tx_in_flight);
    if (s.interval_ns > 0) {
      const double sample =
          1e9 * static_cast<double>(s.delivered_bytes) / static_cast<double>(s.interval_ns);
      latest_bandwidth_ = round_started_ ? sample : std::max(latest_bandwidth_, sample);
      latest_in_flight_ =
          round_started_ ? s.delivered_bytes : std::max(latest_in_flight_, s.delivered_bytes);
      if (sample >= max_bandwidth() || !s.is_app_limited) {
        filter_[cycle_ & 1] = std::max(filter_[cycle_ & 1], sample);
      }
    }
    // Lower bounds, once a round.
    if (!round_started_ || is_probing() || !is_loss_too_high()) return;
    if (low_bandwidth_ > 1e29) low_bandwidth_ = max_bandwidth();
    if (low_in_flight_ == kUnknown) low_in_flight_ = window_;
    low_bandwidth_ = std::max(latest_bandwidth_, kBeta * low_bandwidth_);
    low_in_flight_ = std::max(
        latest_in_flight_, static_cast<std::uint64_t>(kBeta * static_cast<double>(low_in_flight_)));
  }

  void reset_lower_bounds() {
    low_bandwidth_ = 1e30;
    low_in_flight_ = kUnknown;
  }

  // Whether a round's losses are more than a path that drops kLossThreshold by itself would show by
  // chance (two deviations), of what was in flight.
  bool is_loss_too_high() const {
    const auto mtu = static_cast<double>(mtu_);
    const double packets =
        static_cast<double>(std::max(lost_in_round_ + delivered_in_round_, round_in_flight_)) / mtu;
    const double expected = kLossThreshold * packets;
    const double lost = static_cast<double>(lost_in_round_) / mtu;
    return lost > 3 && lost > expected + 2 * std::sqrt(expected);
  }

  void adapt_upper_bounds(const RateSample& s, TimeNs now) {
    if (is_loss_too_high()) {
      if (!is_reacting_) return;
      is_reacting_ = false;
      if (!s.is_app_limited) {
        high_in_flight_ =
            std::max(s.tx_in_flight,
                     static_cast<std::uint64_t>(kBeta * static_cast<double>(target_in_flight())));
      }
      if (state_ == State::kUp) end_up(now);
      return;
    }
    if (high_in_flight_ == kUnknown) return;
    high_in_flight_ = std::max(high_in_flight_, s.tx_in_flight);
    if (state_ == State::kUp) raise_upper_bound(s);
  }

  // Slowly at first, then doubling by round, as long as the window is what holds us.
  void raise_upper_bound(const RateSample& s) {
    if (in_flight_ + s.newly_acked_bytes < window_ || window_ < high_in_flight_) return;
    up_acked_ += s.newly_acked_bytes;
    if (up_acked_ >= up_every_) {
      high_in_flight_ += mtu_ * (up_acked_ / up_every_);
      up_acked_ %= up_every_;
    }
    if (round_started_) set_up_slope();
  }
  void set_up_slope() {
    const std::uint64_t growth = std::uint64_t{1} << std::min<std::uint64_t>(up_rounds_++, 30);
    up_every_ = std::max(window_ / growth, mtu_);
  }

  void update_extra_acked(const RateSample& s, TimeNs now) {
    const auto expected =
        static_cast<std::uint64_t>(bandwidth() * static_cast<double>(now - extra_started_) / 1e9);
    if (extra_delivered_ <= expected) {
      extra_delivered_ = 0;
      extra_started_ = now;
    }
    extra_delivered_ += s.newly_acked_bytes;
    const std::uint64_t above = extra_delivered_ > expected ? extra_delivered_ - expected : 0;
    if (num_rounds_ >= extra_round_ + kExtraAckedRounds) {
      extra_[0] = extra_[1];
      extra_[1] = 0;
      extra_round_ = num_rounds_;
    }
    extra_[1] = std::max(extra_[1], std::min(above, window_));
  }

  void check_startup(const RateSample& s) {
    if (is_full_ || !round_started_ || s.is_app_limited) return;
    if (max_bandwidth() >= full_bandwidth_ * kFullBandwidthGrowth) {
      full_bandwidth_ = max_bandwidth();
      full_rounds_ = 0;
      return;
    }
    is_full_ = ++full_rounds_ >= kFullBandwidthRounds;
  }

  void update_min_rtt(const RateSample& s, TimeNs now) {
    if (s.rtt_ns <= 0) return;
    is_probe_due_ = probe_rtt_at_ != 0 && now > probe_rtt_at_ + kProbeRttIntervalNs;
    if (probe_rtt_min_ == 0 || s.rtt_ns < probe_rtt_min_ || is_probe_due_) {
      probe_rtt_min_ = s.rtt_ns;
      probe_rtt_at_ = now;
    }
    if (min_rtt_ == 0 || probe_rtt_min_ < min_rtt_ || now > min_rtt_at_ + kMinRttFilterNs) {
      min_rtt_ = probe_rtt_min_;
      min_rtt_at_ = probe_rtt_at_;
    }
  }

  // ---------------------------------------------------------------- the cycle
  void move_cycle(const RateSample& s, TimeNs now) {
    if (state_ == State::kStartup && (is_full_ || is_startup_lossy())) {
      is_full_ = true;
      if (high_in_flight_ == kUnknown && is_loss_too_high()) {
        high_in_flight_ = std::max(bdp(1), latest_in_flight_);
      }
      state_ = State::kDrain;
    }
    if (state_ == State::kDrain && in_flight_ <= bdp(1)) start_down(now);
    switch (state_) {
      case State::kDown:
        if (is_time_to_probe(now)) return start_refill();
        if (in_flight_ <= with_headroom() && in_flight_ <= bdp(1)) state_ = State::kCruise;
        return;
      case State::kCruise:
        if (is_time_to_probe(now)) start_refill();
        return;
      case State::kRefill:
        if (round_started_ && num_rounds_ > phase_round_) {
          is_reacting_ = true;
          state_ = State::kUp;
          phase_started_ = now;
          phase_round_ = num_rounds_;
          up_rounds_ = 0;
          up_acked_ = 0;
          full_bandwidth_ = max_bandwidth();
          full_rounds_ = 0;
          set_up_slope();
        }
        return;
      case State::kUp:
        if (has_probed_enough(s, now)) end_up(now);
        return;
      default: return;
    }
  }

  bool is_startup_lossy() const {
    return round_started_ && is_loss_too_high() && lost_in_round_ > 8 * mtu_;
  }

  bool has_probed_enough(const RateSample& s, TimeNs now) {
    if (now - phase_started_ < min_rtt_) return false;
    if (in_flight_ > bdp(kUpPacingGain) + 2 * mtu_ || window_ >= high_in_flight_) {
      // The queue is there: more would only make it longer.
      if (in_flight_ > bdp(kUpPacingGain) + 2 * mtu_) return true;
    }
    if (!round_started_ || s.is_app_limited) return false;
    if (max_bandwidth() >= full_bandwidth_ * kFullBandwidthGrowth) {
      full_bandwidth_ = max_bandwidth();
      full_rounds_ = 0;
      return false;
    }
    return ++full_rounds_ >= kFullBandwidthRounds;
  }

  bool is_time_to_probe(TimeNs now) const {
    // Coexists with loss-based flows: no longer apart than their windows need to grow back.
    const std::uint64_t rounds_max =
        std::min<std::uint64_t>(std::max<std::uint64_t>(bdp(1) / mtu_, 1), 63);
    return now - phase_started_ > probe_wait_ || num_rounds_ - phase_round_ >= rounds_max;
  }

  void end_up(TimeNs now) {
    advance_filter();
    start_down(now);
  }
  void start_down(TimeNs now) {
    state_ = State::kDown;
    reset_lower_bounds();
    phase_started_ = now;
    phase_round_ = num_rounds_;
    probe_wait_ = kProbeWaitNs + static_cast<TimeNs>(rng_.below(kProbeWaitSpreadNs));
  }
  // What was measured lives for two probes. A phase that did not probe, as after PROBE_RTT, forgets
  // nothing.
  void advance_filter() {
    if (filter_[cycle_ & 1] == 0) return;  // a cycle without a sample
    ++cycle_;
    filter_[cycle_ & 1] = 0;
  }
  void start_refill() {
    reset_lower_bounds();
    state_ = State::kRefill;
    phase_round_ = num_rounds_;
  }

  void check_probe_rtt(TimeNs now) {
    if (state_ != State::kProbeRtt) {
      if (!is_probe_due_ || is_restarting_ || state_ == State::kStartup) return;
      prior_window_ = window_;
      state_ = State::kProbeRtt;
      probe_done_at_ = 0;
      is_probe_due_ = false;
      return;
    }
    if (probe_done_at_ == 0) {
      if (in_flight_ <= probe_rtt_window()) {
        probe_done_at_ = now + kProbeRttNs;
        probe_round_ = num_rounds_;
      }
    } else if (now > probe_done_at_ && num_rounds_ > probe_round_) {
      probe_rtt_at_ = now;
      window_ = std::max(window_, prior_window_);
      reset_lower_bounds();
      start_down(now);
      state_ = State::kCruise;
    }
  }
  std::uint64_t probe_rtt_window() const {
    return std::max(bdp(kProbeRttWindowGain), kMinPackets * mtu_);
  }

  // ---------------------------------------------------------------- outputs
  double pacing_gain() const {
    switch (state_) {
      case State::kStartup: return kStartupPacingGain;
      case State::kDrain: return kDrainPacingGain;
      case State::kDown: return kDownPacingGain;
      case State::kUp: return kUpPacingGain;
      default: return 1;
    }
  }
  double window_gain() const {
    switch (state_) {
      case State::kUp: return kUpWindowGain;
      case State::kStartup: return kStartupWindowGain;
      default: return kWindowGain;
    }
  }

  void set_pacing() {
    if (min_rtt_ == 0) return;
    const double rate =
        max_bandwidth() > 0
            ? pacing_gain() * bandwidth() * (state_ == State::kUp ? 1 : kPacingMargin)
            : kStartupPacingGain * 1e9 * static_cast<double>(window_) /
                  static_cast<double>(min_rtt_);
    if (is_full_ || rate > pacing_) pacing_ = rate;
  }

  void set_window(const RateSample& s) {
    // Room for a few bursts and for acknowledgements that come in clumps.
    const std::uint64_t quantum =
        3 * std::max<std::uint64_t>(static_cast<std::uint64_t>(pacing_ / 1000), 2 * mtu_);
    std::uint64_t most = bdp(window_gain()) + std::max(extra_[0], extra_[1]);
    most = std::max(most, quantum + bdp(1));
    if (is_full_) {
      window_ = std::min(window_ + s.newly_acked_bytes, most);
    } else if (window_ < most || s.total_delivered < kInitialPackets * mtu_) {
      window_ += s.newly_acked_bytes;
    }
    window_ = std::max(window_, kMinPackets * mtu_);
    if (state_ == State::kProbeRtt) window_ = std::min(window_, probe_rtt_window());
    std::uint64_t cap = kUnknown;
    if (state_ == State::kCruise || state_ == State::kProbeRtt) {
      cap = with_headroom();
    } else if (state_ != State::kStartup && state_ != State::kDrain) {
      cap = high_in_flight_;
    }
    cap = std::max(std::min(cap, low_in_flight_), kMinPackets * mtu_);
    window_ = std::min(window_, cap);
  }

  std::uint64_t mtu_;
  std::uint64_t window_;
  base::Rng rng_;
  double pacing_ = 0;
  State state_ = State::kStartup;
  std::uint64_t in_flight_ = 0;

  std::uint64_t num_rounds_ = 0, next_round_delivered_ = 0;
  bool round_started_ = false, is_restarting_ = false;

  std::array<double, 2> filter_{};  // maxima of this probing cycle and the one before
  std::uint64_t cycle_ = 0;
  double latest_bandwidth_ = 0, low_bandwidth_ = 1e30;
  std::uint64_t latest_in_flight_ = 0, low_in_flight_ = kUnknown, high_in_flight_ = kUnknown;
  std::uint64_t lost_in_round_ = 0, delivered_in_round_ = 0, round_in_flight_ = 0;
  bool is_reacting_ = true;

  TimeNs extra_started_ = 0;
  std::uint64_t extra_delivered_ = 0, extra_round_ = 0;
  std::array<std::uint64_t, 2> extra_{};

  bool is_full_ = false;
  double full_bandwidth_ = 0;
  int full_rounds_ = 0;

  TimeNs min_rtt_ = 0, min_rtt_at_ = 0, probe_rtt_min_ = 0, probe_rtt_at_ = 0, probe_done_at_ = 0;
  std::uint64_t probe_round_ = 0, prior_window_ = 0;
  bool is_probe_due_ = false;

  TimeNs phase_started_ = 0, probe_wait_ = kProbeWaitNs;
  std::uint64_t phase_round_ = 0, up_rounds_ = 0, up_acked_ = 0, up_every_ = 1;
};

}  // namespace

std::unique_ptr<CongestionControl> make_bbr(std::uint64_t mtu, std::uint64_t seed) {
  return std::make_unique<Bbr>(mtu, seed);
}

}  // namespace pycomm::transport::quic
