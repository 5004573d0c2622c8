// A throwaway that shows that an encrypted transport fits the contract: a toy link whose frames
// travel in QUIC v2 1-RTT packets (one DATAGRAM frame each, RFC 9221), sealed with the keys that
// an aioquic handshake handed over, carries all_reduces of the ordinary executor.
//
//   quic_probe --rank 0|1 --state-fd N --socket-fd M      (started by handshake.py)
//
// What it is not: congestion control, key update, path MTU, loss recovery worth the name (it sends
// again from the first gap). The QUIC transport replaces it.
#include <openssl/crypto.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <string_view>

#include "collectives/execution.h"
#include "handed_over_state.h"
#include "packet_protection.h"
#include "platform/system.h"
#include "transport/core_link.h"

namespace pycomm::probe {
namespace {

using transport::CoreOptions;
using transport::FrameHeader;
using transport::MessageCore;

constexpr std::uint64_t kFragmentBytes = 1'024;
constexpr std::size_t kWindowPackets = 64;
constexpr base::TimeNs kResendNs = 20'000'000;
constexpr std::uint8_t kAckFrame = 0x02;       // RFC 9000 section 19.3
constexpr std::uint8_t kDatagramFrame = 0x31;  // RFC 9221 section 4, with a length

// What stands in front of every message in a DATAGRAM frame: the toy's own order and resending.
struct Order {
  std::uint64_t sequence = 0;  // 0: nothing but an acknowledgement
  std::uint64_t received = 0;  // all up to here have come
};

void append_varint(std::vector<std::uint8_t>& out, std::uint64_t value) {  // RFC 9000 section 16
  for (int shift = 56; shift >= 0; shift -= 8) {
    const auto byte = static_cast<std::uint8_t>(value >> shift);
    out.push_back(shift == 56 ? static_cast<std::uint8_t>(byte | 0xc0) : byte);
  }
}

bool take_varint(std::span<const std::uint8_t>& in, std::uint64_t* value) {
  if (in.empty()) return false;
  const std::size_t length = std::size_t{1} << (in[0] >> 6);
  if (in.size() < length) return false;
  *value = in[0] & 0x3f;
  for (std::size_t i = 1; i < length; ++i) *value = *value << 8 | in[i];
  in = in.subspan(length);
  return true;
}

class QuicProbeLink final : public transport::CoreLink {
 public:
  QuicProbeLink(int socket, std::unique_ptr<PacketProtection> protection, std::uint64_t next_number)
      : CoreLink(options(), nullptr),
        socket_(socket),
        protection_(std::move(protection)),
        packet_number_(next_number) {}

  const char* transport() const override { return "quic-probe"; }
  int fd() const override { return socket_; }
  std::uint64_t num_sealed() const { return num_sealed_; }
  std::uint64_t num_opened() const { return num_opened_; }
  bool all_acknowledged() const { return unacknowledged_.empty(); }

  bool progress() override {
    bool moved = receive();
    while (unacknowledged_.size() < kWindowPackets && core_.front() != nullptr) {
      MessageCore::OutFrame* frame = core_.front();
      std::vector<std::uint8_t> message(sizeof(FrameHeader) + frame->header.payload_bytes);
      std::memcpy(message.data(), &frame->header, sizeof(FrameHeader));
      // A toy copies here; the transport seals straight from the tensor.
      if (frame->header.payload_bytes > 0) {
        std::memcpy(message.data() + sizeof(FrameHeader), frame->payload,
                    frame->header.payload_bytes);
      }
      core_.pop();
      unacknowledged_.push_back(std::move(message));
      transmit(first_unacknowledged_ + unacknowledged_.size() - 1);
      moved = true;
    }
    const base::TimeNs now = platform::real_clock().now_ns();
    if (!unacknowledged_.empty() && now - last_progress_ > kResendNs) {
      for (std::size_t i = 0; i < unacknowledged_.size(); ++i) transmit(first_unacknowledged_ + i);
      last_progress_ = now;
    }
    if (owes_acknowledgement_) transmit(0);
    return moved;
  }

 private:
  static CoreOptions options() {
    CoreOptions core;
    core.eager_bytes_max = kFragmentBytes;
    core.fragment_bytes_max = kFragmentBytes;
    return core;
  }

  void transmit(std::uint64_t sequence) {
    std::vector<std::uint8_t> payload{kAckFrame};
    append_varint(payload, largest_packet_number_);
    append_varint(payload, 0);  // delay
    append_varint(payload, 0);  // further ranges
    append_varint(payload, 0);  // first range: the largest alone
    Order order{sequence, next_expected_ - 1};
    payload.push_back(kDatagramFrame);
    const std::vector<std::uint8_t> empty;
    const auto& message = sequence == 0 ? empty : unacknowledged_[sequence - first_unacknowledged_];
    append_varint(payload, sizeof order + message.size());
    const auto* raw = reinterpret_cast<const std::uint8_t*>(&order);
    payload.insert(payload.end(), raw, raw + sizeof order);
    payload.insert(payload.end(), message.begin(), message.end());
    const auto packet = protection_->seal(packet_number_++, payload);
    if (!packet) return fail(Status::error(StatusCode::kInternal, "sealing failed"));
    ++num_sealed_;
    owes_acknowledgement_ = false;
    // A full socket buffer drops the packet, as a network would; it is sent again.
    [[maybe_unused]] auto ignored = ::send(socket_, packet->data(), packet->size(), MSG_DONTWAIT);
  }

  bool receive() {
    bool moved = false;
    std::uint8_t buffer[2048];
    for (;;) {
      const ssize_t got = recv(socket_, buffer, sizeof buffer, MSG_DONTWAIT);
      if (got <= 0) return moved;
      const auto packet = protection_->open({buffer, static_cast<std::size_t>(got)});
      if (!packet) continue;  // forged, damaged, or of the handshake: no effect
      ++num_opened_;
      largest_packet_number_ = std::max(largest_packet_number_, packet->packet_number);
      moved |= take_frames(packet->payload);
    }
  }

  bool take_frames(std::span<const std::uint8_t> in) {
    std::uint64_t number = 0;
    if (in.empty() || in[0] != kAckFrame) return false;  // still aioquic's
    in = in.subspan(1);
    for (int i = 0; i < 4; ++i) {
      if (!take_varint(in, &number)) return false;
    }
    if (in.empty() || in[0] != kDatagramFrame) return false;
    in = in.subspan(1);
    std::uint64_t length = 0;
    if (!take_varint(in, &length) || length != in.size() || length < sizeof(Order)) return false;
    Order order;
    std::memcpy(&order, in.data(), sizeof order);
    acknowledge(order.received);
    if (order.sequence == 0) return true;
    owes_acknowledgement_ = true;
    if (order.sequence != next_expected_) return false;  // seen, or after a gap
    ++next_expected_;
    deliver(in.subspan(sizeof order));
    return true;
  }

  void acknowledge(std::uint64_t received) {
    while (!unacknowledged_.empty() && first_unacknowledged_ <= received) {
      unacknowledged_.pop_front();
      ++first_unacknowledged_;
      last_progress_ = platform::real_clock().now_ns();
    }
  }

  void deliver(std::span<const std::uint8_t> message) {
    FrameHeader header;
    if (message.size() < sizeof header) return;
    std::memcpy(&header, message.data(), sizeof header);
    if (header.payload_bytes != message.size() - sizeof header) return;
    Status status = core_.begin(header);
    if (status.is_ok()) {
      if (std::byte* target = core_.payload_target();
          target != nullptr && header.payload_bytes > 0) {
        std::memcpy(target, message.data() + sizeof header, header.payload_bytes);
      }
      status = core_.end();
    }
    if (!status.is_ok()) fail(status);
  }

  const int socket_;
  std::unique_ptr<PacketProtection> protection_;
  std::uint64_t packet_number_;
  std::uint64_t largest_packet_number_ = 0;
  std::deque<std::vector<std::uint8_t>> unacknowledged_;
  std::uint64_t first_unacknowledged_ = 1;
  std::uint64_t next_expected_ = 1;
  bool owes_acknowledgement_ = false;
  base::TimeNs last_progress_ = 0;
  std::uint64_t num_sealed_ = 0;
  std::uint64_t num_opened_ = 0;
};

Status all_reduce(QuicProbeLink& link, collectives::GroupContext& group, std::uint64_t op,
                  std::uint64_t count) {
  std::vector<float> data(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    data[i] = static_cast<float>(i % 101) * static_cast<float>(group.rank + 1);
  }
  OpRequest request;
  request.kind = OpKind::kAllReduce;
  request.dtype = DType::kFloat32;
  request.count = count;
  request.input = request.output = reinterpret_cast<std::byte*>(data.data());
  request.op_number = op;
  const base::Clock& clock = platform::real_clock();
  collectives::Execution execution(group, request, clock.now_ns() + base::ms_to_ns(20'000));
  while (!execution.is_finished()) {
    const bool moved = link.progress();
    if (!execution.advance(clock.now_ns()) && !moved) {
      pollfd entry{link.fd(), POLLIN, 0};
      poll(&entry, 1, 1);
    }
  }
  if (!execution.status().is_ok()) return execution.status();
  for (std::uint64_t i = 0; i < count; ++i) {
    if (data[i] != static_cast<float>(i % 101) * 3.0f) {
      return Status::error(StatusCode::kInternal, "a wrong sum at " + std::to_string(i));
    }
  }
  return Status();
}

int run(int rank, int state_fd, int socket_fd) {
  ConnectionState state;
  if (!read_handed_over_state(state_fd, state)) {
    std::fprintf(stderr, "quic_probe: the handed-over state is malformed\n");
    return 1;
  }
  auto protection = PacketProtection::create(state);
  if (!protection) return 1;
  QuicProbeLink link(socket_fd, std::move(protection), state.next_packet_number);
  collectives::GroupContext group;
  group.group = 1;
  group.rank = rank;
  group.world_size = 2;
  group.links = {rank == 0 ? nullptr : &link, rank == 0 ? &link : nullptr};
  const base::Clock& clock = platform::real_clock();
  const base::TimeNs start = clock.now_ns();
  std::uint64_t op = 0;
  for (const std::uint64_t count : {2u, 1'000u, 262'144u}) {
    if (const Status status = all_reduce(link, group, ++op, count); !status.is_ok()) {
      std::fprintf(stderr, "quic_probe rank %d: %s\n", rank, status.to_string().c_str());
      return 1;
    }
  }
  const base::TimeNs spent = clock.now_ns() - start;
  link.close();
  const base::TimeNs end = clock.now_ns() + base::ms_to_ns(500);
  while (clock.now_ns() < end && !(link.peer_departed() && link.all_acknowledged())) {
    link.progress();
    platform::sleep_ns(200'000);
  }
  for (int i = 0; i < 3; ++i) link.progress();
  if (rank == 0) {
    std::printf(
        "4 encrypted  holds  8 B, 4 KB and 1 MiB all_reduce in QUIC v2 1-RTT packets after "
        "an aioquic handshake with certificates on both sides: %llu packets sealed, %llu "
        "opened, %.0f ms; sums right\n",
        static_cast<unsigned long long>(link.num_sealed()),
        static_cast<unsigned long long>(link.num_opened()), static_cast<double>(spent) * 1e-6);
  }
  return 0;
}

}  // namespace
}  // namespace pycomm::probe

int main(int argc, char** argv) {
  int rank = -1, state_fd = -1, socket_fd = -1;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i];
    if (name == "--rank") rank = std::atoi(argv[i + 1]);
    if (name == "--state-fd") state_fd = std::atoi(argv[i + 1]);
    if (name == "--socket-fd") socket_fd = std::atoi(argv[i + 1]);
  }
  if (rank < 0 || rank > 1 || state_fd < 0 || socket_fd < 0) {
    std::fprintf(stderr, "usage: quic_probe --rank 0|1 --state-fd N --socket-fd M\n");
    return 2;
  }
  return pycomm::probe::run(rank, state_fd, socket_fd);
}
