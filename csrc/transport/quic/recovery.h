// What was sent and what became of it: acknowledgement, loss, round trips, delivery rate, timers.
// Source: RFC 9002; RFC 8985 section 7 (reordering window that adapts);
// draft-cheng-iccrg-delivery-rate-estimation. Sans-IO. Thread: the session's.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/rng.h"
#include "pycomm/status.h"
#include "transport/quic/congestion.h"
#include "transport/quic/interval_set.h"

namespace pycomm::transport::quic {

// Frames that are made anew from the session's state when the packet that carried them is lost.
enum Control : std::uint16_t {
  kPing = 1,
  kMaxData = 2,
  kMaxStreamData = 4,
  kRetireIds = 8,
  kHello = 16,
  kPathChallenge = 32,
  kPathResponse = 64,
};

struct SentPacket {
  enum class State : std::uint8_t { kOutstanding, kAcked, kLost, kNotTracked, kSkipped };
  State state = State::kOutstanding;
  bool is_app_limited = false;
  bool is_mtu_probe = false;
  std::uint16_t controls = 0;
  std::uint32_t bytes = 0;
  std::uint32_t stream_bytes = 0;
  std::uint64_t stream_begin = 0;
  base::TimeNs sent_at = 0;
  // Of the delivery rate, when it was sent.
  std::uint64_t delivered = 0;
  base::TimeNs delivered_at = 0, first_sent_at = 0;
  std::uint64_t in_flight = 0;
};

class RecoveryListener {
 public:
  virtual ~RecoveryListener() = default;
  virtual void on_packet_acked(std::uint64_t number, const SentPacket& packet) = 0;
  virtual void on_packet_lost(std::uint64_t number, const SentPacket& packet) = 0;
};

struct AckFrame {
  std::vector<Interval> ranges;  // descending
  base::TimeNs delay_ns = 0;
  bool has_ecn = false;
  std::uint64_t num_marked = 0;
};

class Recovery {
 public:
  Recovery(RecoveryListener& listener, CongestionKind kind, std::uint64_t mtu, std::uint64_t seed,
           std::uint64_t first_number, base::TimeNs first_rtt, base::TimeNs ack_delay_max);

  std::uint64_t next_number() const { return base_ + packets_.size(); }
  // Now and then one number is left out, so that a peer that acknowledges what it never saw is
  // found out (RFC 9000 section 21.4).
  void maybe_skip_number();
  // `ack_eliciting`: counted, watched, congestion controlled.
  void on_sent(SentPacket packet, bool ack_eliciting, base::TimeNs now);
  // Errors: kInternal (it acknowledges what was never sent).
  Status on_ack(const AckFrame& ack, base::TimeNs now);

  // When on_timer() wants to be called, or kNever.
  base::TimeNs next_timer() const;
  // Declares losses, or asks for probes.
  void on_timer(base::TimeNs now);
  int take_probes() { return std::exchange(num_probes_, 0); }
  bool wants_probe() const { return num_probes_ > 0; }
  int num_timeouts() const { return num_timeouts_; }  // in a row

  std::uint64_t in_flight() const { return in_flight_; }
  bool has_outstanding() const { return !outstanding_.empty(); }
  std::uint64_t oldest_outstanding() const { return outstanding_.front().begin; }
  base::TimeNs oldest_sent_at() const { return at(oldest_outstanding()).sent_at; }
  template <class F>
  void for_each_outstanding(F f) const {
    for (const Interval& range : outstanding_) {
      for (std::uint64_t number = range.begin; number < range.end; ++number) f(at(number));
    }
  }
  std::uint64_t num_unacked() const { return next_number() - largest_acked_or(base_); }
  const CongestionControl& congestion() const { return *congestion_; }
  CongestionControl& congestion() { return *congestion_; }
  void set_app_limited() { app_limited_until_ = delivered_ + in_flight_ + 1; }
  bool is_app_limited() const { return app_limited_until_ > 0; }

  base::TimeNs smoothed_rtt() const { return smoothed_rtt_; }
  base::TimeNs latest_rtt() const { return latest_rtt_; }
  base::TimeNs min_rtt() const { return min_rtt_; }
  base::TimeNs probe_timeout() const;
  std::uint64_t num_lost() const { return num_lost_; }
  std::uint64_t num_spurious() const { return num_spurious_; }
  std::uint64_t packet_threshold() const { return packet_threshold_; }

 private:
  SentPacket& at(std::uint64_t number) { return packets_[number - base_]; }
  const SentPacket& at(std::uint64_t number) const { return packets_[number - base_]; }
  std::uint64_t largest_acked_or(std::uint64_t other) const {
    return has_acked_ ? largest_acked_ : other;
  }
  void take_acked(std::uint64_t number, base::TimeNs now, RateSample& sample);
  void note_spurious(std::uint64_t number, const SentPacket& packet);
  void detect_losses(base::TimeNs now, RateSample& sample);
  void lose(std::uint64_t number, RateSample& sample);
  void update_rtt(base::TimeNs rtt, base::TimeNs ack_delay);
  void finish_sample(RateSample& sample, base::TimeNs now);
  void forget(base::TimeNs now);
  base::TimeNs loss_delay() const;

  RecoveryListener& listener_;
  std::unique_ptr<CongestionControl> congestion_;
  base::Rng rng_;
  std::uint64_t base_;  // the number of packets_.front()
  std::deque<SentPacket> packets_;
  IntervalSet outstanding_, lost_, skipped_;
  std::uint64_t next_skip_;
  std::uint64_t largest_acked_ = 0;
  bool has_acked_ = false;
  std::uint64_t in_flight_ = 0;
  base::TimeNs last_eliciting_sent_at_ = 0;
  base::TimeNs waiting_since_ = 0;  // for an acknowledgement, or since the last timeout
  base::TimeNs loss_at_ = base::kNever;
  int num_timeouts_ = 0, num_probes_ = 0;
  std::uint64_t num_lost_ = 0, num_spurious_ = 0, num_marked_ = 0;

  std::uint64_t packet_threshold_;
  int reorder_quarters_ = 1;  // of the least round trip, beyond one

  base::TimeNs smoothed_rtt_, rtt_variation_, latest_rtt_, min_rtt_ = 0;
  const base::TimeNs ack_delay_max_;
  bool has_rtt_ = false;

  std::uint64_t delivered_ = 0, app_limited_until_ = 0;
  base::TimeNs delivered_at_ = 0, first_sent_at_ = 0;
  // Of the newest packet that the current acknowledgement covers.
  base::TimeNs newest_sent_at_ = 0, newest_first_sent_at_ = 0, newest_delivered_at_ = 0;
  base::TimeNs last_acked_sent_at_ = 0;
};

}  // namespace pycomm::transport::quic
