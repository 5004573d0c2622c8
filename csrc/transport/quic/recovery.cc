#include "transport/quic/recovery.h"

#include <algorithm>
#include <utility>

namespace pycomm::transport::quic {
namespace {

using base::TimeNs;
using State = SentPacket::State;

constexpr std::uint64_t kPacketThreshold = 3;  // RFC 9002 section 6.1.1
constexpr std::uint64_t kPacketThresholdMax = 10'000;
constexpr TimeNs kGranularityNs = 1'000'000;
constexpr int kReorderQuartersMax = 4;
constexpr int kPersistentPtos = 3;
constexpr int kProbes = 2;
constexpr int kBackoffMax = 8;
constexpr int kPatience = 3;  // timeouts, while more is being sent
constexpr std::uint64_t kSkipSpread = 4'000;
constexpr std::size_t kSkippedMax = 16;

}  // namespace

Recovery::Recovery(RecoveryListener& listener, CongestionKind kind, std::uint64_t mtu,
                   std::uint64_t seed, std::uint64_t first_number, TimeNs first_rtt,
                   TimeNs ack_delay_max)
    : listener_(listener),
      congestion_(make_congestion_control(kind, mtu, seed)),
      rng_(seed),
      base_(first_number),
      next_skip_(first_number + 1 + rng_.below(kSkipSpread)),
      packet_threshold_(kPacketThreshold),
      smoothed_rtt_(first_rtt),
      rtt_variation_(first_rtt / 2),
      latest_rtt_(first_rtt),
      ack_delay_max_(ack_delay_max) {}

void Recovery::maybe_skip_number() {
  if (next_number() < next_skip_) return;
  const std::uint64_t number = next_number();
  SentPacket skipped;
  skipped.state = State::kSkipped;
  packets_.push_back(skipped);
  skipped_.add(number, number + 1);
  skipped_.keep_last(kSkippedMax);
  next_skip_ = number + 1 + kSkipSpread / 2 + rng_.below(kSkipSpread);
}

void Recovery::on_sent(SentPacket packet, bool ack_eliciting, TimeNs now) {
  const std::uint64_t number = next_number();
  packet.sent_at = now;
  if (!ack_eliciting) {
    packet.state = State::kNotTracked;
    packets_.push_back(packet);
    return;
  }
  if (in_flight_ == 0) first_sent_at_ = delivered_at_ = now;
  congestion_->on_sent(now, in_flight_, is_app_limited());
  in_flight_ += packet.bytes;
  packet.first_sent_at = first_sent_at_;
  packet.delivered_at = delivered_at_;
  packet.delivered = delivered_;
  packet.is_app_limited = is_app_limited();
  packet.in_flight = in_flight_;
  packets_.push_back(packet);
  if (outstanding_.empty()) waiting_since_ = now;
  outstanding_.add(number, number + 1);
  last_eliciting_sent_at_ = now;
}

Status Recovery::on_ack(const AckFrame& ack, TimeNs now) {
  if (ack.ranges.empty() || ack.ranges.front().end > next_number()) {
    return Status::error(StatusCode::kInternal, "the peer acknowledges packets that were not sent");
  }
  const std::uint64_t largest = ack.ranges.front().end - 1;
  RateSample sample;
  newest_sent_at_ = 0;
  std::vector<Interval> acked;
  for (const Interval& range : ack.ranges) {
    bool is_honest = true;
    skipped_.for_each_common(range.begin, range.end, [&](auto, auto) { is_honest = false; });
    if (!is_honest) {
      return Status::error(StatusCode::kInternal,
                           "the peer acknowledges a packet number that was left out");
    }
    const std::uint64_t begin = std::max(range.begin, base_);
    if (begin >= range.end) continue;
    outstanding_.for_each_common(
        begin, range.end, [&](std::uint64_t b, std::uint64_t e) { acked.push_back({b, e}); });
    std::vector<Interval> late;
    lost_.for_each_common(begin, range.end,
                          [&](std::uint64_t b, std::uint64_t e) { late.push_back({b, e}); });
    for (const Interval& i : late) {
      for (std::uint64_t n = i.begin; n < i.end; ++n) note_spurious(n, at(n));
      lost_.subtract(i.begin, i.end);
    }
  }
  const bool is_new_largest = !has_acked_ || largest > largest_acked_;
  largest_acked_ = has_acked_ ? std::max(largest_acked_, largest) : largest;
  has_acked_ = true;
  if (acked.empty()) return Status();
  const std::uint64_t newest =
      std::max_element(acked.begin(), acked.end(), [](auto& a, auto& b) { return a.end < b.end; })
          ->end -
      1;
  if (is_new_largest && newest == largest) {
    const TimeNs rtt = now - at(largest).sent_at;
    update_rtt(rtt, ack.delay_ns);
    sample.rtt_ns = std::max<TimeNs>(rtt, 1);
  }
  for (const Interval& i : acked) {
    outstanding_.subtract(i.begin, i.end);
    for (std::uint64_t n = i.begin; n < i.end; ++n) take_acked(n, now, sample);
  }
  if (ack.has_ecn && ack.num_marked > num_marked_) {
    sample.num_marked = ack.num_marked - num_marked_;
    num_marked_ = ack.num_marked;
  }
  num_timeouts_ = 0;
  num_probes_ = 0;
  waiting_since_ = now;
  detect_losses(now, sample);
  finish_sample(sample, now);
  forget(now);
  return Status();
}

void Recovery::take_acked(std::uint64_t number, TimeNs now, RateSample& sample) {
  SentPacket& packet = at(number);
  packet.state = State::kAcked;
  in_flight_ -= packet.bytes;
  delivered_ += packet.bytes;
  delivered_at_ = now;
  sample.newly_acked_bytes += packet.bytes;
  if (newest_sent_at_ == 0 || packet.sent_at >= newest_sent_at_) {
    newest_sent_at_ = packet.sent_at;
    newest_first_sent_at_ = packet.first_sent_at;
    newest_delivered_at_ = packet.delivered_at;
    sample.prior_delivered = packet.delivered;
    sample.is_app_limited = packet.is_app_limited;
    sample.tx_in_flight = packet.in_flight;
    first_sent_at_ = packet.sent_at;
  }
  last_acked_sent_at_ = std::max(last_acked_sent_at_, packet.sent_at);
  listener_.on_packet_acked(number, packet);
}

// It was only late: take more patience from now on.
void Recovery::note_spurious(std::uint64_t number, const SentPacket& packet) {
  ++num_spurious_;
  const std::uint64_t distance =
      next_number() > number ? largest_acked_ - std::min(largest_acked_, number) : 0;
  packet_threshold_ = std::clamp(distance + 1, packet_threshold_, kPacketThresholdMax);
  reorder_quarters_ = std::min(reorder_quarters_ + 1, kReorderQuartersMax);
  listener_.on_packet_acked(number, packet);
}

void Recovery::finish_sample(RateSample& sample, TimeNs now) {
  sample.total_delivered = delivered_;
  if (app_limited_until_ > 0 && delivered_ >= app_limited_until_) app_limited_until_ = 0;
  if (sample.newly_acked_bytes > 0) {
    const TimeNs sending = newest_sent_at_ - newest_first_sent_at_;
    const TimeNs acking = now - newest_delivered_at_;
    const TimeNs interval = std::max(sending, acking);
    // Shorter than the path's round trip: acknowledgements came in a clump.
    if (interval >= min_rtt_ && interval > 0) {
      sample.interval_ns = interval;
      sample.delivered_bytes = delivered_ - sample.prior_delivered;
    }
  }
  congestion_->on_sample(sample, in_flight_, now);
}

TimeNs Recovery::loss_delay() const {
  const TimeNs rtt = std::max(smoothed_rtt_, latest_rtt_);
  // 9/8 at first, up to two round trips where packets are seen to overtake.
  const TimeNs extra = reorder_quarters_ == 1 ? rtt / 8 : rtt * reorder_quarters_ / 4;
  return std::max(rtt + extra, kGranularityNs);
}

void Recovery::detect_losses(TimeNs now, RateSample& sample) {
  loss_at_ = base::kNever;
  if (!has_acked_) return;
  const TimeNs delay = loss_delay();
  std::vector<Interval> lost;
  bool goes_on = true;
  for (std::size_t i = 0; i < outstanding_.num_intervals() && goes_on; ++i) {
    const Interval interval = outstanding_[i];
    std::uint64_t n = interval.begin;
    for (; n < interval.end && n < largest_acked_; ++n) {
      const SentPacket& packet = at(n);
      const bool is_far = n + packet_threshold_ <= largest_acked_;
      if (!is_far && packet.sent_at + delay > now) {
        loss_at_ = packet.sent_at + delay;
        break;
      }
    }
    if (n > interval.begin) lost.push_back({interval.begin, n});
    goes_on = n == interval.end;
  }
  if (lost.empty()) return;
  const TimeNs first_at = std::max(at(lost.front().begin).sent_at, last_acked_sent_at_);
  const TimeNs last_at = at(lost.back().end - 1).sent_at;
  for (const Interval& i : lost) {
    outstanding_.subtract(i.begin, i.end);
    for (std::uint64_t n = i.begin; n < i.end; ++n) lose(n, sample);
  }
  const TimeNs persistent =
      kPersistentPtos *
      (smoothed_rtt_ + std::max(4 * rtt_variation_, kGranularityNs) + ack_delay_max_);
  if (has_rtt_ && last_at - first_at > persistent) congestion_->on_persistent_congestion();
}

void Recovery::lose(std::uint64_t number, RateSample& sample) {
  SentPacket& packet = at(number);
  packet.state = State::kLost;
  in_flight_ -= packet.bytes;
  lost_.add(number, number + 1);
  if (!packet.is_mtu_probe) {  // its size was the question
    ++num_lost_;
    sample.newly_lost_bytes += packet.bytes;
    sample.largest_lost_sent_at = std::max(sample.largest_lost_sent_at, packet.sent_at);
  }
  listener_.on_packet_lost(number, packet);
}

void Recovery::forget(TimeNs now) {
  const TimeNs old = now - 3 * probe_timeout();
  while (!packets_.empty()) {
    const SentPacket& packet = packets_.front();
    if (packet.state == State::kOutstanding) return;
    if (packet.state == State::kLost) {
      if (packet.sent_at > old) return;
      lost_.subtract(base_, base_ + 1);
    }
    if (base_ >= largest_acked_) return;
    packets_.pop_front();
    ++base_;
  }
}

void Recovery::update_rtt(TimeNs rtt, TimeNs ack_delay) {
  latest_rtt_ = std::max<TimeNs>(rtt, 1);
  if (!has_rtt_) {
    has_rtt_ = true;
    min_rtt_ = smoothed_rtt_ = latest_rtt_;
    rtt_variation_ = latest_rtt_ / 2;
    return;
  }
  min_rtt_ = std::min(min_rtt_, latest_rtt_);
  ack_delay = std::min(ack_delay, ack_delay_max_);
  TimeNs adjusted = latest_rtt_;
  if (adjusted >= min_rtt_ + ack_delay) adjusted -= ack_delay;
  const TimeNs deviation = std::abs(smoothed_rtt_ - adjusted);
  rtt_variation_ = (3 * rtt_variation_ + deviation) / 4;
  smoothed_rtt_ = (7 * smoothed_rtt_ + adjusted) / 8;
}

TimeNs Recovery::probe_timeout() const {
  return smoothed_rtt_ + std::max(4 * rtt_variation_, kGranularityNs) + ack_delay_max_;
}

TimeNs Recovery::next_timer() const {
  if (loss_at_ != base::kNever) return loss_at_;
  if (outstanding_.empty()) return base::kNever;
  // Whoever keeps sending small things must not put the timeout off for ever, as it may by RFC
  // 9002.
  const TimeNs timeout = probe_timeout() << std::min(num_timeouts_, kBackoffMax);
  return std::min(last_eliciting_sent_at_ + timeout, waiting_since_ + kPatience * timeout);
}

void Recovery::on_timer(TimeNs now) {
  if (now < next_timer()) return;
  if (loss_at_ != base::kNever) {
    RateSample sample;
    detect_losses(now, sample);
    if (sample.newly_lost_bytes > 0) finish_sample(sample, now);
    return;
  }
  ++num_timeouts_;
  num_probes_ = kProbes;
  last_eliciting_sent_at_ = waiting_since_ = now;  // the next one counts from here
}

}  // namespace pycomm::transport::quic
