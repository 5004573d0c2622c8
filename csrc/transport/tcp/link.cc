// A TCP link: frames back to back on one stream. Payload is gathered from the sender's memory by
// sendmsg and received straight into its destination; only headers and small frames pass a buffer.
// Under TLS the payload of one side passes OpenSSL's buffers.
#include <cstring>
#include <vector>

#include "platform/sockets.h"
#include "transport/tcp/factory.h"

namespace pycomm::transport::tcp {
namespace {

using platform::IoOutcome;
using platform::IoResult;

constexpr std::size_t kReadBufferBytes = 64 * 1024;
constexpr std::size_t kFramesPerWrite = 16;
// Payload above this is read into its destination directly, below it through the buffer.
constexpr std::uint64_t kDirectReadBytes = 4 * 1024;

class TcpLink final : public CoreLink {
 public:
  TcpLink(std::unique_ptr<platform::ByteStream> stream, const CoreOptions& options)
      : CoreLink(options, nullptr), stream_(std::move(stream)), buffer_(kReadBufferBytes) {}

  const char* transport() const override { return stream_->is_encrypted() ? "tls" : "tcp"; }
  int fd() const override { return stream_->fd(); }
  bool wants_write() const override { return write_blocked_; }
  // Closing with unread bytes resets the connection and may cost the peer our last ones.
  void end_writing() override { stream_->end_writing(); }
  bool awaits_peers_end() const override { return true; }

  bool progress() override {
    if (!failure().is_ok()) return false;
    if (has_ended_) {
      const bool drops = core_.front() != nullptr;
      end_after_goodbye();
      return drops;
    }
    const bool received = receive();
    const bool sent = !has_ended() && transmit();
    return received || sent;
  }

 private:
  // --- out
  bool transmit() {
    bool moved = false;
    write_blocked_ = stream_->flush().outcome == IoOutcome::kWouldBlock;
    while (!write_blocked_ && core_.front() != nullptr) {
      iovec vectors[2 * kFramesPerWrite];
      const int count = gather(vectors);
      const IoResult result = stream_->write_vectors(vectors, count);
      if (result.outcome == IoOutcome::kWouldBlock) {
        write_blocked_ = true;
        break;
      }
      if (result.outcome != IoOutcome::kMoved) {
        lose(result);
        return true;
      }
      moved = true;
      retire_written(result.bytes);
    }
    return moved;
  }

  int gather(iovec* vectors) {
    int count = 0;
    std::uint64_t skip = front_written_;
    for (std::size_t i = 0; i < kFramesPerWrite; ++i) {
      MessageCore::OutFrame* frame = core_.at(i);
      if (frame == nullptr) break;
      const std::uint64_t header_bytes = sizeof(FrameHeader);
      if (skip < header_bytes) {
        vectors[count++] = {reinterpret_cast<char*>(&frame->header) + skip, header_bytes - skip};
        skip = 0;
      } else {
        skip -= header_bytes;
      }
      if (frame->header.payload_bytes > skip) {
        vectors[count++] = {const_cast<std::byte*>(frame->payload) + skip,
                            frame->header.payload_bytes - skip};
      }
      skip = 0;
    }
    return count;
  }

  void retire_written(std::uint64_t bytes) {
    front_written_ += bytes;
    while (MessageCore::OutFrame* frame = core_.front()) {
      const std::uint64_t frame_bytes = sizeof(FrameHeader) + frame->header.payload_bytes;
      if (front_written_ < frame_bytes) {
        frame->started = front_written_ > 0;
        return;
      }
      front_written_ -= frame_bytes;
      core_.counters().bytes_direct += frame->header.payload_bytes;
      core_.pop();
    }
  }

  // --- in
  bool receive() {
    bool moved = false;
    for (;;) {
      // The rest of a large payload goes where it belongs, or, if nobody wants it, nowhere.
      std::byte* target = in_payload_ && payload_left_ >= kDirectReadBytes && filled_ == used_
                              ? core_.payload_target()
                              : nullptr;
      IoResult result;
      if (target != nullptr) {
        result = stream_->read_some(target + payload_done_, payload_left_);
      } else {
        compact();
        result = stream_->read_some(buffer_.data() + filled_, buffer_.size() - filled_);
      }
      if (result.outcome == IoOutcome::kWouldBlock) return moved;
      if (result.outcome != IoOutcome::kMoved) {
        lose(result);
        return true;
      }
      moved = true;
      if (target != nullptr) {
        core_.counters().bytes_direct += result.bytes;
        advance_payload(result.bytes);
      } else {
        filled_ += result.bytes;
        parse();
      }
      if (has_ended()) return true;
    }
  }

  void compact() {
    if (used_ == 0) return;
    std::memmove(buffer_.data(), buffer_.data() + used_, filled_ - used_);
    filled_ -= used_;
    used_ = 0;
  }

  void parse() {
    for (;;) {
      const std::uint64_t available = filled_ - used_;
      if (in_payload_) {
        const std::uint64_t bytes = std::min(available, payload_left_);
        if (bytes == 0) return;
        if (std::byte* target = core_.payload_target()) {
          std::memcpy(target + payload_done_, buffer_.data() + used_, bytes);
          core_.counters().bytes_staged += bytes;
        }
        used_ += bytes;
        advance_payload(bytes);
      } else {
        if (available < sizeof(FrameHeader)) return;
        FrameHeader header;
        std::memcpy(&header, buffer_.data() + used_, sizeof header);
        used_ += sizeof header;
        Status status = core_.begin(header);
        if (!status.is_ok()) return fail(status);
        in_payload_ = true;
        payload_done_ = 0;
        payload_left_ = header.payload_bytes;
        advance_payload(0);
      }
      if (!failure().is_ok()) return;
    }
  }

  void advance_payload(std::uint64_t bytes) {
    payload_done_ += bytes;
    payload_left_ -= bytes;
    if (payload_left_ > 0) return;
    in_payload_ = false;
    Status status = core_.end();
    if (!status.is_ok()) fail(status);
  }

  void lose(const IoResult& result) {
    if (peer_departed()) {
      stream_->end_writing();
      return end_after_goodbye();
    }
    const std::string why = result.outcome == IoOutcome::kClosed
                                ? "its process ended without a goodbye"
                                : stream_->explain(result);
    fail(Status::error(StatusCode::kPeerLost, why));
  }

  const std::unique_ptr<platform::ByteStream> stream_;
  std::uint64_t front_written_ = 0;  // bytes of the front frame that have left
  bool write_blocked_ = false;
  std::vector<std::byte> buffer_;
  std::size_t used_ = 0;    // parsed
  std::size_t filled_ = 0;  // received
  bool in_payload_ = false;
  std::uint64_t payload_done_ = 0;
  std::uint64_t payload_left_ = 0;
};

}  // namespace

std::unique_ptr<CoreLink> make_link(std::unique_ptr<platform::ByteStream> stream,
                                    const LinkOptions& options) {
  CoreOptions core;
  core.eager_bytes_max = options.eager_bytes_max;
  return std::make_unique<TcpLink>(std::move(stream), core);
}

}  // namespace pycomm::transport::tcp
