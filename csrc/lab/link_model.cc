#include "lab/link_model.h"

#include <algorithm>

namespace pycomm::lab {
namespace {

constexpr base::TimeNs kDuplicateAfterNs = 1'000;

}  // namespace

bool LinkModel::is_chosen(double probability) {
  if (probability <= 0) return false;
  return static_cast<double>(rng_.next() >> 11) * 0x1p-53 < probability;
}

// Source: E. N. Gilbert, "Capacity of a burst-noise channel", BSTJ 39, 1960; E. O. Elliott, 1963.
bool LinkModel::is_lost() {
  if (shape_.burst_begins > 0) {
    if (is_chosen(is_in_burst_ ? shape_.burst_ends : shape_.burst_begins)) {
      is_in_burst_ = !is_in_burst_;
    }
    if (is_in_burst_ && is_chosen(shape_.burst_loss)) return true;
  }
  return is_chosen(shape_.loss);
}

base::TimeNs LinkModel::departure(base::TimeNs sent) {
  base::TimeNs at = sent + shape_.delay_ns;
  if (shape_.jitter_ns > 0) {
    at += static_cast<base::TimeNs>(rng_.below(static_cast<std::uint64_t>(shape_.jitter_ns)));
    if (!shape_.reorders) at = std::max(at, last_departure_);
  }
  last_departure_ = std::max(at, last_departure_);
  return at;
}

Fate LinkModel::admit(std::uint32_t bytes, base::TimeNs now) {
  Fate fate;
  ++report_.num_in;
  if (shape_.mtu_bytes > 0 && bytes > shape_.mtu_bytes) {
    ++report_.num_too_long;
    return fate;
  }
  if (is_lost()) {
    ++report_.num_lost;
    return fate;
  }
  base::TimeNs sent = now;
  if (shape_.rate_bits_per_s > 0) {
    const base::TimeNs begins = std::max(now, free_at_);
    const base::TimeNs waits = begins - now;
    if (waits > shape_.queue_ns) {
      ++report_.num_overflow;
      return fate;
    }
    report_.queue_ns_max = std::max(report_.queue_ns_max, waits);
    fate.is_marked = shape_.marks_ecn && waits > shape_.queue_ns / 4;
    sent = begins +
           static_cast<base::TimeNs>(8e9 * bytes / static_cast<double>(shape_.rate_bits_per_s));
    free_at_ = sent;
  }
  fate.at[0] = departure(sent);
  fate.num_copies = 1;
  if (is_chosen(shape_.duplicates)) {
    fate.at[1] = fate.at[0] + kDuplicateAfterNs;
    fate.num_copies = 2;
  }
  report_.num_out += static_cast<std::uint64_t>(fate.num_copies);
  report_.bytes_out += bytes * static_cast<std::uint64_t>(fate.num_copies);
  return fate;
}

}  // namespace pycomm::lab
