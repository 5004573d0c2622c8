// What comes in: packets, frames, addresses.
#include <algorithm>
#include <cstring>

#include "transport/quic/frames.h"
#include "transport/quic/session.h"

namespace pycomm::transport::quic {
namespace {

using base::TimeNs;

constexpr std::size_t kReceivedRangesMax = 64;
// RFC 9000 section 13.2.2 recommends every second; once a path is known to be long and busy, one
// acknowledgement serves a batch, which spares both ends most of their small packets.
constexpr int kAckEvery = 2, kAckEveryOfMany = 10;
constexpr std::uint64_t kManyPackets = 1'000;
constexpr TimeNs kAckDelayNs = 1'000'000;  // far below what we may
constexpr std::uint8_t kReservedBits = 0x18;
constexpr int kOldKeysPtos = 3;
constexpr std::size_t kPeerIdsMax = 16;
constexpr std::uint64_t kStreamOffsetMax = kVarintMax;
constexpr int kPathPtos = 3;

}  // namespace

bool Session::receive(std::span<std::uint8_t> datagram, const UdpAddress& from, Ecn ecn,
                      TimeNs now) {
  if (is_closed_ || !failure_.is_ok()) return true;
  const auto opened = protection_->open(datagram, own_ids_[0].bytes.size(), largest_received_, now);
  if (!opened) {
    if (protection_->is_exhausted()) violate("too many forged packets");
    return false;
  }
  ++counters_.packets_received;
  counters_.bytes_received += datagram.size();
  now_ = now;
  silent_since_ = base::kNever;
  unreachable_since_ = base::kNever;
  keep_alive_at_ = now + options_.keep_alive_ns;
  if (protection_->has_old_keys()) {
    protection_->drop_old_keys_at(now + kOldKeysPtos * recovery_->probe_timeout());
  }
  const std::uint64_t number = opened->packet_number;
  if (number < received_floor_ || received_.contains(number)) {
    ++counters_.packets_duplicate;
    return true;
  }
  if ((opened->first_byte & kReservedBits) != 0) {
    violate("reserved bits are set");
    return true;
  }
  const bool is_newest = received_.empty() || number > largest_received_;
  elicits_ = false;
  is_probing_only_ = true;
  parse(opened->payload, number, now);
  if (is_newest && !is_probing_only_ && (from.port != peer_.port || from.host != peer_.host)) {
    on_other_address(from, datagram.size(), now);
  } else if (!is_validated_ && from.port == peer_.port && from.host == peer_.host) {
    path_received_ += datagram.size();
  }
  note_received(number, elicits_, ecn, datagram.size(), now);
  if (options_.qlog) {
    options_.qlog->end_packet(Qlog::Direction::kReceived, number, datagram.size(), now);
    trace(now);
  }
  return true;
}

void Session::note_received(std::uint64_t number, bool elicits, Ecn ecn, std::size_t bytes,
                            TimeNs now) {
  const bool is_in_order = received_.empty() || number == received_.back().end;
  received_.add(number, number + 1);
  if (received_.num_intervals() > kReceivedRangesMax) {
    received_.keep_last(kReceivedRangesMax);
    received_floor_ = received_.front().begin;
  }
  if (number >= largest_received_) {
    largest_received_ = number;
    largest_received_at_ = now;
  }
  ++ecn_counts_[static_cast<int>(ecn)];
  if (!elicits) return;
  ++num_unacked_eliciting_;
  const int every = counters_.packets_received > kManyPackets ? kAckEveryOfMany : kAckEvery;
  // At once for what is out of order, marked, the end of a burst, or the second; else soon.
  const bool is_last_of_burst = bytes < mtu_.current();
  if (!is_in_order || ecn == Ecn::kMarked || num_unacked_eliciting_ >= every || is_last_of_burst) {
    ack_at_ = now;
  } else {
    ack_at_ = std::min(ack_at_, now + kAckDelayNs);
  }
}

void Session::parse(std::span<const std::uint8_t> payload, std::uint64_t, TimeNs now) {
  Reader reader(payload);
  if (payload.empty()) return violate("a packet without a frame");
  while (reader.left() > 0 && failure_.is_ok()) {
    const std::uint64_t type = reader.varint();
    const bool is_told_apart = (type >= kFrameStream && type <= kFrameStreamLast) ||
                               type == kFrameAck || type == kFrameAckEcn;
    if (options_.qlog && !is_told_apart) options_.qlog->add_frame(type);
    if (!parse_frame(reader, type, now)) return violate("an unknown frame " + std::to_string(type));
    if (reader.failed()) return violate("a frame that is cut short");
    if (type != kFramePadding && type != kFrameAck && type != kFrameAckEcn &&
        type != kFrameCloseTransport && type != kFrameCloseApplication) {
      elicits_ = true;
    }
    if (type != kFramePadding && type != kFramePathChallenge && type != kFramePathResponse &&
        type != kFrameNewConnectionId) {
      is_probing_only_ = false;
    }
  }
}

bool Session::parse_frame(Reader& reader, std::uint64_t type, TimeNs now) {
  if (type >= kFrameStream && type <= kFrameStreamLast) {
    on_stream(reader, type, now);
    return true;
  }
  switch (type) {
    case kFramePadding:
    case kFramePing:
    case kFrameHandshakeDone: return true;
    case kFrameAck:
    case kFrameAckEcn: on_ack_frame(reader, type == kFrameAckEcn, now); return true;
    case kFrameResetStream: {
      const std::uint64_t id = reader.varint();
      reader.varint();
      reader.varint();
      if (id == stream_id_) fail(StatusCode::kPeerLost, "it reset the stream");
      return true;
    }
    case kFrameStopSending: {
      const std::uint64_t id = reader.varint();
      reader.varint();
      if (id == stream_id_) fail(StatusCode::kPeerLost, "it takes no more of the stream");
      return true;
    }
    case kFrameCrypto:  // a ticket that nobody uses
      reader.varint();
      reader.span(reader.varint());
      return true;
    case kFrameNewToken: reader.span(reader.varint()); return true;
    case kFrameMaxData: send_max_ = std::max(send_max_, reader.varint()); return true;
    case kFrameMaxStreamData: {
      const std::uint64_t id = reader.varint();
      const std::uint64_t max = reader.varint();
      if (id == stream_id_) stream_send_max_ = std::max(stream_send_max_, max);
      return true;
    }
    case kFrameMaxStreamsBidi:
    case kFrameMaxStreamsUni:
    case kFrameStreamsBlockedBidi:
    case kFrameStreamsBlockedUni: reader.varint(); return true;
    case kFrameDataBlocked:
      reader.varint();
      controls_ |= kMaxData;  // ours may have been lost
      return true;
    case kFrameStreamDataBlocked:
      reader.varint();
      reader.varint();
      controls_ |= kMaxData | kMaxStreamData;
      return true;
    case kFrameNewConnectionId: on_new_connection_id(reader); return true;
    case kFrameRetireConnectionId: {
      const std::uint64_t sequence = reader.varint();
      // The last one stays, whatever the peer says: without one it could not reach us.
      if (own_ids_.size() > 1) {
        std::erase_if(own_ids_, [&](const ConnectionId& id) { return id.sequence == sequence; });
      }
      return true;
    }
    case kFramePathChallenge: {
      const auto data = reader.span(response_.size());
      if (data.empty()) return true;
      std::copy(data.begin(), data.end(), response_.begin());
      controls_ |= kPathResponse;
      return true;
    }
    case kFramePathResponse: {
      const auto data = reader.span(challenge_.size());
      if (!is_validated_ &&
          std::equal(data.begin(), data.end(), challenge_.begin(), challenge_.end())) {
        is_validated_ = true;
        validated_peer_ = peer_;
        path_deadline_ = base::kNever;
      }
      return true;
    }
    case kFrameCloseTransport:
    case kFrameCloseApplication: on_close(reader, type == kFrameCloseApplication); return true;
    case kFrameDatagram: on_datagram(reader.span(reader.left())); return true;
    case kFrameDatagramLength: on_datagram(reader.span(reader.varint())); return true;
    default: return false;
  }
}

void Session::on_ack_frame(Reader& reader, bool has_ecn, TimeNs now) {
  AckFrame ack;
  const std::uint64_t largest = reader.varint();
  const std::uint64_t delay = reader.varint();
  const std::uint64_t num_more = reader.varint();
  std::uint64_t first = reader.varint();
  if (reader.failed()) return;
  if (first > largest) return violate("an acknowledgement of negative numbers");
  ack.delay_ns = delay > (std::uint64_t{1} << 40)
                     ? base::ms_to_ns(1'000'000)
                     : static_cast<TimeNs>(
                           (delay << std::min<std::uint64_t>(ack_delay_exponent_, 20)) * 1'000);
  ack.ranges.push_back({largest - first, largest + 1});
  for (std::uint64_t i = 0; i < num_more; ++i) {
    const std::uint64_t gap = reader.varint();
    const std::uint64_t size = reader.varint();
    if (reader.failed()) return;
    const std::uint64_t above = ack.ranges.back().begin;
    if (above < gap + 2 || above - gap - 2 < size) {
      return violate("an acknowledgement of negative numbers");
    }
    const std::uint64_t top = above - gap - 2;
    ack.ranges.push_back({top - size, top + 1});
  }
  if (has_ecn) {
    reader.varint();
    reader.varint();
    ack.has_ecn = true;
    ack.num_marked = reader.varint();
    if (reader.failed()) return;
  }
  if (options_.qlog) options_.qlog->add_ack(ack.ranges);
  const Status status = recovery_->on_ack(ack, now);
  if (!status.is_ok()) return violate(status.message());
  stream_.settle();
}

void Session::on_stream(Reader& reader, std::uint64_t type, TimeNs now) {
  const std::uint64_t id = reader.varint();
  const std::uint64_t offset = (type & kStreamOffsetBit) != 0 ? reader.varint() : 0;
  const std::uint64_t bytes = (type & kStreamLengthBit) != 0 ? reader.varint() : reader.left();
  const auto data = reader.span(bytes);
  if (reader.failed()) return;
  if (options_.qlog) options_.qlog->add_stream(id, offset, bytes);
  if (offset > kStreamOffsetMax - bytes) return violate("a stream beyond its end");
  if (id != stream_id_) {
    // Of the handshake, or of a stock peer's: legal, and of no use here.
    other_received_ += bytes;
    return;
  }
  if (offset + bytes > stream_receive_max_ ||
      offset + bytes + other_received_ > receive_max_ + stream_.receive_window()) {
    return violate("more bytes than it may send");
  }
  if (!stream_.on_bytes(offset, data, now)) return violate("a stream of holes");
  grant();
  if ((type & kStreamFinBit) != 0) fail(StatusCode::kPeerLost, "it ended the stream");
}

// Grants more in good time: what came over any path counts.
void Session::grant() {
  const std::uint64_t end = stream_.consumed() + stream_.receive_window();
  const std::uint64_t step = stream_.receive_window() / 4;
  if (end >= stream_receive_max_ + step) {
    stream_receive_max_ = end;
    controls_ |= kMaxStreamData;
  }
  if (end + other_received_ >= receive_max_ + step) {
    receive_max_ = end + other_received_;
    controls_ |= kMaxData;
  }
}

void Session::on_datagram(std::span<const std::uint8_t> bytes) {
  if (bytes.size() != kHelloBytes || std::memcmp(bytes.data(), kHelloText, kHelloBytes - 1) != 0) {
    return;
  }
  peer_is_live_ = true;
  const std::uint8_t said = bytes[kHelloBytes - 1];
  is_heard_ |= (said & kHelloHearsYou) != 0;
  if (is_heard_) hello_at_ = base::kNever;
  if ((said & kHelloKnowsIt) == 0) controls_ |= kHello;  // tell it that it is heard
}

void Session::on_new_connection_id(Reader& reader) {
  ConnectionId id;
  id.sequence = reader.varint();
  const std::uint64_t retire_before = reader.varint();
  const auto text = [](std::span<const std::uint8_t> bytes) {
    return std::string(bytes.begin(), bytes.end());
  };
  id.bytes = text(reader.span(reader.fixed(1)));
  id.reset_token = text(reader.span(16));
  if (reader.failed()) return;
  if (id.bytes.empty() || id.bytes.size() > kConnectionIdBytesMax || retire_before > id.sequence) {
    return violate("a malformed connection ID");
  }
  const bool is_known = std::any_of(peer_ids_.begin(), peer_ids_.end(), [&](const ConnectionId& p) {
    return p.sequence == id.sequence;
  });
  if (!is_known && id.sequence >= retired_before_) peer_ids_.push_back(id);
  if (retire_before > retired_before_) {
    retired_before_ = retire_before;
    std::erase_if(peer_ids_, [&](const ConnectionId& p) { return p.sequence < retired_before_; });
    controls_ |= kRetireIds;
  }
  if (peer_ids_.size() > kPeerIdsMax || peer_ids_.empty()) violate("too many connection IDs");
}

void Session::on_close(Reader& reader, bool is_application) {
  const std::uint64_t code = reader.varint();
  if (!is_application) reader.varint();
  const auto reason = reader.span(reader.varint());
  if (reader.failed()) return;
  std::string words;
  for (const std::uint8_t c : reason.first(std::min<std::size_t>(reason.size(), 200))) {
    words += c >= ' ' && c <= '~' ? static_cast<char>(c) : '?';
  }
  fail(StatusCode::kPeerLost, "it closed the connection" + (words.empty() ? "" : ": " + words) +
                                  (code == 0 ? "" : " (code " + std::to_string(code) + ")"));
}

// A packet that nobody forged came from elsewhere: a NAT forgot, or the peer moved. It is answered
// there, as far as amplification allows, and the address has to answer a challenge.
void Session::on_other_address(const UdpAddress& from, std::size_t bytes, TimeNs now) {
  peer_ = from;
  ++counters_.num_migrations;
  if (from.port == validated_peer_.port && from.host == validated_peer_.host) {
    is_validated_ = true;
    path_deadline_ = base::kNever;
    return;
  }
  is_validated_ = false;
  path_received_ = bytes;
  path_sent_ = 0;
  for (std::uint8_t& byte : challenge_) byte = static_cast<std::uint8_t>(rng_.next());
  controls_ |= kPathChallenge;
  path_deadline_ = now + kPathPtos * recovery_->probe_timeout();
}

}  // namespace pycomm::transport::quic
