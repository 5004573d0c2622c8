#include "transport/quic/stream.h"

#include <algorithm>

namespace pycomm::transport::quic {
namespace {

using base::TimeNs;

constexpr std::uint64_t kFirstWindow = 1 << 20;
constexpr double kWindowTrips = 8;
constexpr std::size_t kHolesMax = 1 << 16;

}  // namespace

void Stream::add_path(const StreamPath& path, std::uint64_t receive_max) {
  paths_.push_back(&path);
  receive_window_ = std::max({receive_window_, receive_max, kFirstWindow});
}

// Bytes that a quicker path would have delivered before the first packet of this one arrives are
// left to it: else the slowest path decides when a message is whole.
bool Stream::leaves_to_quicker(const StreamPath& path) const {
  if (paths_.size() < 2) return false;
  std::uint64_t backlog = source_.end_offset() - next_;
  for (const Interval& range : resend_) backlog += range.size();
  const TimeNs mine = path.round_trip() / 2;
  for (const StreamPath* other : paths_) {
    const double rate = other->bytes_per_s();
    if (other == &path || !other->is_useful() || rate <= 0) continue;
    const TimeNs theirs = other->round_trip() / 2;
    if (theirs < mine &&
        static_cast<double>(backlog) / rate * 1e9 < static_cast<double>(mine - theirs))
      return true;
  }
  return false;
}

bool Stream::next_range(const StreamPath& path, std::uint64_t limit, std::uint64_t* begin,
                        std::uint64_t* end) const {
  if (!resend_.empty() && resend_.front().begin < limit) {
    *begin = resend_.front().begin;
    *end = std::min(resend_.front().end, limit);
  } else {
    *begin = next_;
    *end = std::min(source_.end_offset(), limit);
  }
  return *begin < *end && !leaves_to_quicker(path);
}

bool Stream::on_sent(std::uint64_t begin, std::uint64_t end) {
  if (begin == next_) {
    next_ = end;
    return false;
  }
  resend_.subtract(begin, end);
  return true;
}

void Stream::on_acked(std::uint64_t begin, std::uint64_t end) {
  acked_.add(begin, end);
  resend_.subtract(begin, end);
}

void Stream::on_lost(std::uint64_t begin, std::uint64_t end) {
  acked_.for_each_gap(begin, end, [&](std::uint64_t b, std::uint64_t e) { resend_.add(b, e); });
}

void Stream::settle() {
  const std::uint64_t floor = acked_.contiguous_end(0);
  if (floor == settled_) return;
  settled_ = floor;
  source_.on_acked(floor);
}

TimeNs Stream::longest_round_trip() const {
  TimeNs longest = 0;
  for (const StreamPath* path : paths_) longest = std::max(longest, path->round_trip());
  return longest;
}

// A sender that finds its rate sends up to three times as much in the next round trip, and what it
// may send then has to be on its way to it a round trip before.
void Stream::grow_window(TimeNs now) {
  const TimeNs trip = longest_round_trip();
  grow_at_ = now + trip;
  const double took = static_cast<double>(std::max<TimeNs>(now - window_grown_at_, 1));
  const double per_trip = static_cast<double>(consumed() - window_grown_offset_) *
                          std::min(1.0, static_cast<double>(trip) / took);
  const auto wanted = static_cast<std::uint64_t>(kWindowTrips * per_trip);
  receive_window_ = std::min(std::max(receive_window_, wanted), receive_window_max_);
  window_grown_at_ = now;
  window_grown_offset_ = consumed();
}

bool Stream::on_bytes(std::uint64_t offset, std::span<const std::uint8_t> bytes, TimeNs now) {
  const std::uint64_t end = offset + bytes.size();
  const std::uint64_t before = consumed();
  // All in order, as ever; nothing lies beyond.
  if (offset == before && (received_.empty() || received_.back().end == before)) {
    sink_.on_bytes(offset, bytes);
  } else {
    received_.for_each_gap(offset, end, [&](std::uint64_t b, std::uint64_t e) {
      sink_.on_bytes(b, bytes.subspan(b - offset, e - b));
    });
  }
  received_.add(offset, end);
  const std::uint64_t after = consumed();
  if (after == before) return received_.num_intervals() <= kHolesMax;
  sink_.on_prefix(after);
  if (now >= grow_at_) grow_window(now);
  return true;
}

}  // namespace pycomm::transport::quic
