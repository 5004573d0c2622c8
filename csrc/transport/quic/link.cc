// A link over one or several QUIC connections: frames back to back on one stream. What is large is
// sealed from where the user has it and stays there until acknowledged; what is small is copied, so
// that it is done at once. A payload goes to its destination in whatever order its packets come;
// only what lies beyond the next frame's header has to wait in memory of ours. A connection that
// fails is left out while another carries on.
#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "platform/system.h"
#include "transport/quic/factory.h"

namespace pycomm::transport::quic {
namespace {

using base::TimeNs;
using platform::real_clock;

constexpr std::uint64_t kFragmentBytes = 4 << 20;   // a cancelled send copies at most this
constexpr std::uint64_t kCopyBytesMax = 16 * 1024;  // of a frame that is copied
constexpr std::uint64_t kCopiesBytesMax = 2 << 20;  // of all of them
constexpr std::uint64_t kPlacedAheadBytes = 16 << 20;
constexpr std::uint64_t kWindowsAhead = 4;
constexpr std::size_t kAheadPiecesMax = 1 << 18;  // above the largest window in whole packets
constexpr TimeNs kRetryNs = 100'000;

std::string text_of(const UdpAddress& address) {
  return address.host + ":" + std::to_string(address.port);
}

class QuicLink final : public CoreLink, public StreamSource, public StreamSink {
 public:
  QuicLink(const CoreOptions& options, std::uint64_t receive_window_max)
      : CoreLink(options, nullptr), stream_(*this, *this, receive_window_max) {}
  ~QuicLink() override {
    for (const Path& path : paths_) path.endpoint->remove(*path.session);
  }

  Status add_path(std::shared_ptr<Endpoint> endpoint, const HandedOver& state,
                  const SessionOptions& options, TimeNs now) {
    auto session = Session::create(state, options, stream_, now);
    if (!session.is_ok()) return session.status();
    endpoint->add(*session.value());
    paths_.push_back({std::move(endpoint), std::move(session).value()});
    return Status();
  }
  std::size_t num_paths() const { return paths_.size(); }
  const Session& session(std::size_t path) const { return *paths_[path].session; }

  const char* transport() const override { return "quic"; }
  int fd() const override { return -1; }
  bool is_flushed() const override { return core_.is_idle() && pieces_.empty(); }
  void end_writing() override {
    for (const Path& path : paths_) {
      path.session->close("goodbye");
      path.endpoint->flush(*path.session, real_clock().now_ns());
    }
  }

  TimeNs next_deadline() const override {
    if (!failure().is_ok() || has_ended_) return base::kNever;
    TimeNs at = base::kNever;
    for (const Path& path : paths_) {
      at = std::min(
          at, path.is_blocked ? real_clock().now_ns() + kRetryNs : path.session->next_deadline());
    }
    return at;
  }

  bool progress() override {
    if (!failure().is_ok()) return false;
    const bool received = std::exchange(has_received_, false);
    if (has_ended_) {
      const bool drops = core_.front() != nullptr;
      end_after_goodbye();
      return drops;
    }
    const TimeNs now = real_clock().now_ns();
    for (const Path& path : paths_) path.session->on_timer(now);
    const bool placed = place();
    if (paths_.size() > 1) {  // the quickest takes first
      std::sort(paths_.begin(), paths_.end(), [](const Path& a, const Path& b) {
        return a.session->round_trip() < b.session->round_trip();
      });
    }
    bool sent = false;
    for (Path& path : paths_) {
      const std::uint64_t before = path.session->packets_sent();
      path.is_blocked = !path.endpoint->flush(*path.session, now);
      sent |= path.session->packets_sent() != before;
    }
    leave_out_failed();
    return received || placed || sent;
  }

  // --- StreamSource
  std::uint64_t end_offset() const override { return end_; }

  int gather(std::uint64_t offset, std::uint64_t bytes, iovec* out, int max) override {
    int count = 0;
    std::size_t i = piece_at(offset);
    std::size_t frame = num_frames_before(i);
    for (; i < pieces_.size() && bytes > 0 && count < max; ++i) {
      Piece& piece = pieces_[i];
      const std::uint64_t skip = offset - piece.begin;
      if (piece.is_frame) {
        MessageCore::OutFrame& of = *core_.at(frame++);
        constexpr std::uint64_t kHeader = sizeof(FrameHeader);
        std::uint64_t done = 0;
        if (skip < kHeader) {
          done = std::min(bytes, kHeader - skip);
          out[count++] = {reinterpret_cast<char*>(&of.header) + skip, done};
        }
        const std::uint64_t at = skip + done;
        if (done < bytes && at < piece.bytes && count < max) {
          const std::uint64_t rest = std::min(bytes - done, piece.bytes - at);
          out[count++] = {const_cast<std::byte*>(of.payload) + (at - kHeader), rest};
          done += rest;
        }
        offset += done;
        bytes -= done;
        if (offset < piece.begin + piece.bytes) break;
      } else {
        const std::uint64_t taken = std::min(bytes, piece.bytes - skip);
        out[count++] = {piece.copy.data() + skip, taken};
        offset += taken;
        bytes -= taken;
      }
    }
    return count;
  }

  void on_acked(std::uint64_t offset) override {
    while (!pieces_.empty() && pieces_.front().begin + pieces_.front().bytes <= offset) {
      const Piece& piece = pieces_.front();
      if (piece.is_frame) {
        core_.counters().bytes_direct += piece.bytes - sizeof(FrameHeader);
        core_.pop();
        --num_frames_;
      } else {
        copied_bytes_ -= piece.bytes;
      }
      pieces_.pop_front();
    }
  }

  // --- StreamSink
  void on_bytes(std::uint64_t offset, std::span<const std::uint8_t> bytes) override {
    has_received_ = true;
    if (!failure().is_ok()) return;
    if (in_payload_ && offset < payload_end_) {
      const std::uint64_t part = std::min<std::uint64_t>(bytes.size(), payload_end_ - offset);
      put_payload(offset, bytes.first(part));
      offset += part;
      bytes = bytes.subspan(part);
    }
    if (bytes.empty()) return;
    if (ahead_.size() >= kAheadPiecesMax) {
      return fail(Status::error(StatusCode::kInternal, "the peer sends its stream in crumbs"));
    }
    ahead_.emplace(offset, std::vector<std::uint8_t>(bytes.begin(), bytes.end()));
  }

  void on_prefix(std::uint64_t offset) override {
    while (failure().is_ok() && !has_ended_) {
      if (in_payload_) {
        if (offset < payload_end_) return;
        in_payload_ = false;
        const Status status = core_.end();
        if (!status.is_ok()) return fail(status);
      } else {
        if (offset < payload_end_ + sizeof(FrameHeader)) return;
        FrameHeader header;
        take_ahead(payload_end_, {reinterpret_cast<std::uint8_t*>(&header), sizeof header});
        const Status status = core_.begin(header);
        if (!status.is_ok()) return fail(status);
        in_payload_ = true;
        payload_begin_ = payload_end_ + sizeof header;
        payload_end_ = payload_begin_ + header.payload_bytes;
        place_ahead();
      }
    }
  }

 private:
  struct Path {
    std::shared_ptr<Endpoint> endpoint;
    std::unique_ptr<Session> session;
    bool is_blocked = false;  // the socket was full
  };
  // A frame of the core's, in its order, or a copy of one that the core has let go of.
  struct Piece {
    std::uint64_t begin = 0;
    std::uint64_t bytes = 0;
    bool is_frame = false;
    std::vector<std::uint8_t> copy;
  };

  // Gives frames their place in the stream.
  bool place() {
    bool moved = false;
    // What was lost, and lost again, holds the floor for some round trips.
    std::uint64_t window = 0;
    for (const Path& path : paths_) window += path.session->recovery().congestion().window_bytes();
    const std::uint64_t ahead = kPlacedAheadBytes + kWindowsAhead * window;
    while (end_ - acked_floor() < ahead) {
      MessageCore::OutFrame* frame = core_.at(num_frames_);
      if (frame == nullptr) break;
      Piece piece;
      piece.begin = end_;
      piece.bytes = sizeof(FrameHeader) + frame->header.payload_bytes;
      end_ += piece.bytes;
      moved = true;
      // Only the first can be let go of, so what is small waits behind what is large.
      if (num_frames_ == 0 && piece.bytes <= kCopyBytesMax &&
          copied_bytes_ + piece.bytes <= kCopiesBytesMax) {
        piece.copy.resize(piece.bytes);
        std::memcpy(piece.copy.data(), &frame->header, sizeof(FrameHeader));
        if (frame->header.payload_bytes > 0) {
          std::memcpy(piece.copy.data() + sizeof(FrameHeader), frame->payload,
                      frame->header.payload_bytes);
        }
        core_.counters().bytes_staged += frame->header.payload_bytes;
        copied_bytes_ += piece.bytes;
        core_.pop();
      } else {
        piece.is_frame = true;
        frame->started = true;
        ++num_frames_;
      }
      pieces_.push_back(std::move(piece));
    }
    return moved;
  }
  std::uint64_t acked_floor() const { return pieces_.empty() ? end_ : pieces_.front().begin; }

  std::size_t piece_at(std::uint64_t offset) const {
    const auto after = std::upper_bound(
        pieces_.begin(), pieces_.end(), offset,
        [](std::uint64_t value, const Piece& piece) { return value < piece.begin; });
    PYCOMM_CHECK(after != pieces_.begin());
    return static_cast<std::size_t>(after - pieces_.begin()) - 1;
  }
  // Copies come first: one is made only while no frame waits.
  std::size_t num_frames_before(std::size_t index) const {
    const std::size_t num_copies = pieces_.size() - num_frames_;
    return index > num_copies ? index - num_copies : 0;
  }

  void put_payload(std::uint64_t offset, std::span<const std::uint8_t> bytes) {
    if (std::byte* target = core_.payload_target()) {
      std::memcpy(target + (offset - payload_begin_), bytes.data(), bytes.size());
      core_.counters().bytes_direct += bytes.size();
    }
  }

  // Moves what came early to where it belongs.
  void place_ahead() {
    while (!ahead_.empty() && ahead_.begin()->first < payload_end_) {
      auto node = ahead_.extract(ahead_.begin());
      const std::uint64_t offset = node.key();
      const std::span<const std::uint8_t> bytes(node.mapped());
      const std::uint64_t part = std::min<std::uint64_t>(bytes.size(), payload_end_ - offset);
      put_payload(offset, bytes.first(part));
      if (part < bytes.size()) {
        const auto rest = bytes.subspan(part);
        ahead_.emplace(offset + part, std::vector<std::uint8_t>(rest.begin(), rest.end()));
      }
    }
  }
  // Takes [offset, offset + out.size()), all of which is there.
  void take_ahead(std::uint64_t offset, std::span<std::uint8_t> out) {
    std::size_t done = 0;
    while (done < out.size()) {
      PYCOMM_CHECK(!ahead_.empty() && ahead_.begin()->first == offset + done);
      auto node = ahead_.extract(ahead_.begin());
      const std::vector<std::uint8_t>& bytes = node.mapped();
      const std::size_t part = std::min(bytes.size(), out.size() - done);
      std::memcpy(out.data() + done, bytes.data(), part);
      done += part;
      if (part < bytes.size()) {
        ahead_.emplace(offset + done,
                       std::vector<std::uint8_t>(bytes.begin() + static_cast<std::ptrdiff_t>(part),
                                                 bytes.end()));
      }
    }
  }

  // Paths that failed are left out while another is there; with the last one the link fails.
  void leave_out_failed() {
    for (std::size_t i = 0; i < paths_.size();) {
      Session& session = *paths_[i].session;
      const Status& over = session.failure();
      if (over.is_ok()) {
        ++i;
        continue;
      }
      if (paths_.size() == 1) {
        if (!peer_departed()) return fail(over);
        return end_after_goodbye();
      }
      if (!peer_departed()) {
        base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
                  "the path to " + text_of(session.peer()) + " is left out: " + over.message() +
                      "; " + std::to_string(paths_.size() - 1) +
                      " of the connections to that "
                      "process go on");
      }
      session.hand_back();
      paths_[i].endpoint->flush(session, real_clock().now_ns());  // a last word, if it owes one
      paths_[i].endpoint->remove(session);
      paths_.erase(paths_.begin() + static_cast<std::ptrdiff_t>(i));
      // If it was the peer that ended, the others learn it now and not by a keep-alive.
      for (const Path& path : paths_) path.session->ping();
    }
  }

  Stream stream_;
  std::vector<Path> paths_;     // never empty
  std::deque<Piece> pieces_;    // not yet acknowledged
  std::size_t num_frames_ = 0;  // of pieces_: the core's first so many
  std::uint64_t end_ = 0;
  std::uint64_t copied_bytes_ = 0;
  bool in_payload_ = false;
  std::uint64_t payload_begin_ = 0, payload_end_ = 0;  // the next header begins at the end
  std::map<std::uint64_t, std::vector<std::uint8_t>> ahead_;
  bool has_received_ = false;
};

}  // namespace

Result<std::unique_ptr<CoreLink>> make_link(std::shared_ptr<Endpoint> endpoint,
                                            const HandedOver& state, const LinkOptions& options,
                                            TimeNs now) {
  CoreOptions core;
  core.eager_bytes_max = options.eager_bytes_max;
  core.fragment_bytes_max = kFragmentBytes;
  auto link = std::make_unique<QuicLink>(core, options.session.receive_window_max);
  PYCOMM_RETURN_IF_ERROR(link->add_path(std::move(endpoint), state, options.session, now));
  return std::unique_ptr<CoreLink>(std::move(link));
}

Status add_path(CoreLink& link, std::shared_ptr<Endpoint> endpoint, const HandedOver& state,
                const LinkOptions& options, TimeNs now) {
  auto* quic = dynamic_cast<QuicLink*>(&link);
  if (quic == nullptr) return Status::error(StatusCode::kInvalidUsage, "that link is not QUIC's");
  return quic->add_path(std::move(endpoint), state, options.session, now);
}

std::vector<PathStats> path_stats(const CoreLink& link) {
  std::vector<PathStats> all;
  const auto* quic = dynamic_cast<const QuicLink*>(&link);
  for (std::size_t i = 0; quic != nullptr && i < quic->num_paths(); ++i) {
    const Session& session = quic->session(i);
    const SessionCounters counters = session.counters();
    const CongestionControl& congestion = session.recovery().congestion();
    PathStats stats;
    stats.peer = text_of(session.peer());
    stats.rtt_s = static_cast<double>(session.recovery().smoothed_rtt()) / 1e9;
    stats.bandwidth_bytes_per_s = congestion.bandwidth_bytes_per_s();
    stats.bytes_sent = counters.bytes_sent;
    stats.packets_sent = counters.packets_sent;
    stats.packets_lost = counters.packets_lost;
    stats.bytes_resent = counters.stream_bytes_resent;
    stats.window_bytes = congestion.window_bytes();
    stats.mtu = session.mtu();
    all.push_back(std::move(stats));
  }
  return all;
}

}  // namespace pycomm::transport::quic
