// A set of 64-bit numbers as half-open intervals: packet numbers and stream offsets. Sorted, never
// touching; operations near the end are cheap, which is where traffic happens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pycomm::transport::quic {

struct Interval {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t size() const { return end - begin; }
};

class IntervalSet {
 public:
  bool empty() const { return intervals_.empty(); }
  std::size_t num_intervals() const { return intervals_.size(); }
  const Interval& operator[](std::size_t i) const { return intervals_[i]; }
  const Interval& front() const { return intervals_.front(); }
  const Interval& back() const { return intervals_.back(); }
  auto begin() const { return intervals_.begin(); }
  auto end() const { return intervals_.end(); }

  void add(std::uint64_t begin, std::uint64_t end) {
    if (begin >= end) return;
    if (intervals_.empty() || begin > intervals_.back().end) {
      intervals_.push_back({begin, end});
      return;
    }
    const auto first = first_with_end_from(begin);  // touching counts
    if (first->begin > end) {
      intervals_.insert(first, {begin, end});
      return;
    }
    auto last = first;
    while (last != intervals_.end() && last->begin <= end) ++last;
    first->begin = std::min(first->begin, begin);
    first->end = std::max((last - 1)->end, end);
    intervals_.erase(first + 1, last);
  }

  void subtract(std::uint64_t begin, std::uint64_t end) {
    if (begin >= end) return;
    auto it = first_with_end_from(begin + 1);
    while (it != intervals_.end() && it->begin < end) {
      const Interval old = *it;
      if (old.begin < begin && old.end > end) {
        it->end = begin;
        intervals_.insert(it + 1, {end, old.end});
        return;
      }
      if (old.begin < begin) {
        it->end = begin;
        ++it;
      } else if (old.end > end) {
        it->begin = end;
        return;
      } else {
        it = intervals_.erase(it);
      }
    }
  }

  bool contains(std::uint64_t value) const {
    const auto it = first_with_end_from(value + 1);
    return it != intervals_.end() && it->begin <= value;
  }

  // Calls f(begin, end) for each part of [begin, end) that is not in the set.
  template <class F>
  void for_each_gap(std::uint64_t begin, std::uint64_t end, F f) const {
    for (auto it = first_with_end_from(begin + 1); it != intervals_.end() && begin < end; ++it) {
      if (it->begin >= end) break;
      if (it->begin > begin) f(begin, it->begin);
      begin = std::max(begin, it->end);
    }
    if (begin < end) f(begin, end);
  }
  // Calls f(begin, end) for each part of [begin, end) that is in the set.
  template <class F>
  void for_each_common(std::uint64_t begin, std::uint64_t end, F f) const {
    for (auto it = first_with_end_from(begin + 1); it != intervals_.end(); ++it) {
      if (it->begin >= end) break;
      f(std::max(begin, it->begin), std::min(end, it->end));
    }
  }

  // Where the run that starts at `from` ends; `from` itself if it is not in the set.
  std::uint64_t contiguous_end(std::uint64_t from) const {
    const auto it = first_with_end_from(from + 1);
    return it != intervals_.end() && it->begin <= from ? it->end : from;
  }

  void keep_last(std::size_t count) {
    if (intervals_.size() > count) {
      intervals_.erase(intervals_.begin(), intervals_.end() - static_cast<std::ptrdiff_t>(count));
    }
  }
  void clear() { intervals_.clear(); }

 private:
  std::vector<Interval>::iterator first_with_end_from(std::uint64_t value) {
    if (!intervals_.empty() && intervals_.back().begin <= value) {
      return intervals_.back().end >= value ? intervals_.end() - 1 : intervals_.end();
    }
    return std::lower_bound(intervals_.begin(), intervals_.end(), value,
                            [](const Interval& i, std::uint64_t v) { return i.end < v; });
  }
  std::vector<Interval>::const_iterator first_with_end_from(std::uint64_t value) const {
    return const_cast<IntervalSet*>(this)->first_with_end_from(value);
  }

  std::vector<Interval> intervals_;
};

}  // namespace pycomm::transport::quic
