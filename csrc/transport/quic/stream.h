// One stream of bytes each way between two processes, and the paths (sessions) that carry it: each
// takes the next bytes when its window and pace allow, so that bytes are striped by measured rate.
// What a path lost, or had under way when it failed, any other sends again. Every connection sees
// an ordinary QUIC stream; with several, each sees a part of it.
// Thread: the sessions'.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/clock.h"
#include "transport/quic/interval_set.h"

namespace pycomm::transport::quic {

// What the owner has to send, by absolute offset in the stream. Bytes stay where they are, and the
// same, until acknowledged.
class StreamSource {
 public:
  virtual ~StreamSource() = default;
  virtual std::uint64_t end_offset() const = 0;
  // The bytes [offset, offset + bytes) as pieces of memory; returns how many.
  virtual int gather(std::uint64_t offset, std::uint64_t bytes, iovec* out, int max) = 0;
  // Everything below `offset` has arrived.
  virtual void on_acked(std::uint64_t offset) = 0;
};

class StreamSink {
 public:
  virtual ~StreamSink() = default;
  // Bytes that are new, in any order; once each.
  virtual void on_bytes(std::uint64_t offset, std::span<const std::uint8_t> bytes) = 0;
  // Everything below `offset` is there.
  virtual void on_prefix(std::uint64_t offset) = 0;
};

// A path as the stream sees it.
class StreamPath {
 public:
  virtual ~StreamPath() = default;
  // It carries bytes: the peer listens on it, and answers.
  virtual bool is_useful() const = 0;
  virtual base::TimeNs round_trip() const = 0;
  virtual double bytes_per_s() const = 0;  // 0: not known yet
};

class Stream {
 public:
  Stream(StreamSource& source, StreamSink& sink, std::uint64_t receive_window_max)
      : source_(source), sink_(sink), receive_window_max_(receive_window_max) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void add_path(const StreamPath& path, std::uint64_t receive_max);
  void remove_path(const StreamPath& path) { std::erase(paths_, &path); }
  bool has_other_path(const StreamPath& path) const {
    return std::any_of(paths_.begin(), paths_.end(), [&](const StreamPath* other) {
      return other != &path && other->is_useful();
    });
  }

  // --- sending
  StreamSource& source() { return source_; }
  // What `path` should send next, below `limit`. False: nothing, or nothing for this path.
  bool next_range(const StreamPath& path, std::uint64_t limit, std::uint64_t* begin,
                  std::uint64_t* end) const;
  // Returns whether these bytes were sent before.
  bool on_sent(std::uint64_t begin, std::uint64_t end);
  void on_acked(std::uint64_t begin, std::uint64_t end);
  void on_lost(std::uint64_t begin, std::uint64_t end);
  // Tells the source how far the peer has everything.
  void settle();

  // --- receiving
  // False: with more holes than any network makes.
  bool on_bytes(std::uint64_t offset, std::span<const std::uint8_t> bytes, base::TimeNs now);
  std::uint64_t consumed() const { return received_.contiguous_end(0); }
  // Bytes that the peer may be ahead by: some times what comes in a round trip.
  std::uint64_t receive_window() const { return receive_window_; }

 private:
  bool leaves_to_quicker(const StreamPath& path) const;
  base::TimeNs longest_round_trip() const;
  void grow_window(base::TimeNs now);

  StreamSource& source_;
  StreamSink& sink_;
  const std::uint64_t receive_window_max_;
  std::vector<const StreamPath*> paths_;
  std::uint64_t next_ = 0;  // first byte never sent
  IntervalSet resend_, acked_, received_;
  std::uint64_t settled_ = 0;
  std::uint64_t receive_window_ = 0;
  base::TimeNs window_grown_at_ = 0, grow_at_ = 0;
  std::uint64_t window_grown_offset_ = 0;
};

}  // namespace pycomm::transport::quic
