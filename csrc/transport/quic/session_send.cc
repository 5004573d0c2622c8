// What goes out: acknowledgements, control frames, the stream; as fast as the window, the pace and
// the peer allow.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "transport/quic/frames.h"
#include "transport/quic/session.h"

namespace pycomm::transport::quic {
namespace {

using base::TimeNs;

constexpr std::size_t kAckRangesMax = 24;
constexpr std::size_t kScratchBytes = 512;  // frames that are not the stream's bytes
constexpr std::size_t kControlRoom = 24;    // for a control frame, at most
constexpr std::size_t kAckPacketBytesMax = 480;
constexpr std::size_t kAckBytes = 56;         // of a frame with one range and marks, at most
constexpr std::size_t kAckRangeBytes = 16;    // of each more, at most
constexpr std::size_t kStreamHeaderMax = 20;  // type, id, offset, length
constexpr std::size_t kAnsweredBytesMin = 48;
constexpr std::size_t kStreamBytesMin = 32;  // less is not worth a frame
constexpr int kPiecesMax = 8;
constexpr TimeNs kBurstNs = 1'000'000;
constexpr std::size_t kBurstBytesMax = 64'000;
constexpr TimeNs kCreditNsMax = 5'000'000;
constexpr int kCreditPart = 8;
constexpr TimeNs kHelloEveryMinNs = 10'000'000;
constexpr std::uint64_t kAmplification = 3;  // RFC 9000 section 8

}  // namespace

struct Session::Plan {
  SentPacket packet;
  bool elicits = false;
  iovec pieces[kPiecesMax];
  int num_pieces = 0;
  std::size_t stream_bytes = 0;
};

std::size_t Session::overhead() const {
  return Protection::overhead(
      peer_ids_[0].bytes.size(),
      Protection::packet_number_bytes(recovery_->next_number(), recovery_->num_unacked()));
}

bool Session::is_window_open() const {
  return recovery_->in_flight() + mtu_.current() <= recovery_->congestion().window_bytes();
}

// What may be sent to an address that has not answered a challenge yet (RFC 9000 section 8).
std::uint64_t Session::path_budget() const {
  if (is_validated_) return UINT64_MAX;
  const std::uint64_t most = kAmplification * path_received_;
  return most > path_sent_ ? most - path_sent_ : 0;
}

bool Session::next_stream_range(std::uint64_t* begin, std::uint64_t* end) const {
  if (!peer_is_live_) return false;
  // What a path that does not answer would get, another one delivers.
  if (!is_useful() && stream_.has_other_path(*this)) return false;
  const std::uint64_t limit =
      std::min(stream_send_max_, send_max_ > other_sent_ ? send_max_ - other_sent_ : 0);
  return stream_.next_range(*this, limit, begin, end);
}

bool Session::has_something_to_send() const {
  std::uint64_t begin, end;
  return controls_ != 0 || recovery_->wants_probe() || next_stream_range(&begin, &end);
}

// What may leave at once: a millisecond's worth, so that timers keep up, and never a whole batch
// into a slow path.
std::size_t Session::burst_bytes() const {
  const double rate = recovery_->congestion().pacing_bytes_per_s();
  const std::size_t least = 2 * mtu_.current();
  if (rate <= 0) return kInitialPackets * mtu_.current();
  return std::clamp(static_cast<std::size_t>(rate * kBurstNs / 1e9), least, kBurstBytesMax);
}

std::size_t Session::send(std::span<std::uint8_t> out, std::size_t* packet_bytes, TimeNs now) {
  *packet_bytes = mtu_.current();
  now_ = now;
  if (owes_close_) {
    owes_close_ = false;
    return *packet_bytes = send_close(out, now);
  }
  if (is_closed_ || !failure_.is_ok()) return 0;
  if (protection_->wants_update()) protection_->update();
  grant();
  const std::size_t size = mtu_.current();
  const bool is_paced = now < send_at_;
  if (!is_paced && is_window_open() && peer_is_live_ && is_validated_) {
    if (const std::size_t bytes = send_mtu_probe(out, now); bytes > 0) {
      counters_.bytes_sent += bytes;
      return *packet_bytes = bytes;
    }
  }
  std::size_t total = 0, eliciting = 0;
  int num_probes = recovery_->take_probes();
  const std::size_t most = std::min(out.size(), burst_bytes());
  while (total + size <= out.size()) {
    if (protection_->is_worn_out()) {
      fail(StatusCode::kPeerLost, "it acknowledged nothing for as long as one key may serve");
      break;
    }
    if (is_path_exhausted()) break;
    // What proves an address waits for no window: that may be full of what the last one swallowed.
    const bool proves = (controls_ & (kPathChallenge | kPathResponse)) != 0;
    const bool is_probe = num_probes > 0 || proves;
    const bool may_elicit = is_probe || (!is_paced && is_window_open() && total < most);
    if (!may_elicit && !(total == 0 && now >= ack_at_)) break;
    const std::uint64_t before = recovery_->in_flight();
    const std::size_t room =
        std::min<std::uint64_t>(may_elicit ? size : kAckPacketBytesMax, path_budget());
    const std::size_t bytes = send_packet(out.subspan(total), room, !may_elicit, is_probe, now);
    if (bytes == 0) break;
    num_probes -= num_probes > 0 ? 1 : 0;
    total += bytes;
    path_sent_ += bytes;
    eliciting += recovery_->in_flight() - before;
    if (bytes < size || !may_elicit) break;  // the last of a batch may be shorter
  }
  if (eliciting > 0) {
    const double rate = recovery_->congestion().pacing_bytes_per_s();
    if (rate > 0) {
      // What a late timer, or a busy processor, cost is made good, up to a part of the round trip
      // that any queue bears.
      const TimeNs credit =
          std::clamp(recovery_->smoothed_rtt() / kCreditPart, kBurstNs, kCreditNsMax);
      send_at_ = std::max(send_at_, now - credit) +
                 static_cast<TimeNs>(1e9 * static_cast<double>(eliciting) / rate);
    }
  }
  std::uint64_t begin, end;
  if (is_window_open() && !next_stream_range(&begin, &end)) recovery_->set_app_limited();
  counters_.bytes_sent += total;
  if (total > 0) trace(now);
  if (total > 0 && total < *packet_bytes) *packet_bytes = total;
  return total;
}

// One packet of at most `size` bytes; 0 if there is nothing to put into it. Not full-sized: nothing
// else was there.
std::size_t Session::send_packet(std::span<std::uint8_t> out, std::size_t size, bool only_acks,
                                 bool is_probe, TimeNs now) {
  std::array<std::uint8_t, kScratchBytes> scratch;
  const std::size_t room = size - overhead();
  Plan plan;
  Writer writer(std::span<std::uint8_t>(scratch.data(), std::min(scratch.size(), room)));
  if (!only_acks && !is_validated_) write_controls(writer, plan);  // a challenge comes first
  const bool has_ack =
      num_unacked_eliciting_ > 0 && (now >= ack_at_ || !only_acks) && writer.left() >= kAckBytes;
  if (has_ack) write_ack(writer, now);
  if (!only_acks) {
    write_controls(writer, plan);
    const std::size_t left = room - writer.size();
    if (left >= kStreamHeaderMax + kStreamBytesMin && writer.left() >= kStreamHeaderMax) {
      plan.stream_bytes = left;
      plan_stream(writer, plan);
    }
    if (is_probe && !plan.elicits && writer.left() > 0) {
      writer.varint(kFramePing);
      plan.packet.controls |= kPing;
      plan.elicits = true;
    }
  }
  if (writer.size() == 0) return 0;
  if (has_ack && !plan.elicits && now < ack_at_) {
    return 0;  // an acknowledgement alone waits for its time
  }
  const std::size_t number_bytes =
      Protection::packet_number_bytes(recovery_->next_number(), recovery_->num_unacked());
  if (plan.stream_bytes == 0) {  // PADDING; the stream's bytes follow their frame's header at once
    // What asks for an answer is long enough to be answered by a stateless reset too.
    const std::size_t least =
        plan.elicits ? kAnsweredBytesMin - overhead() : kPacketNumberBytesMax - number_bytes;
    while (writer.size() < least && writer.left() > 0) writer.fixed(0, 1);
  }
  iovec pieces[kPiecesMax + 1];
  pieces[0] = {scratch.data(), writer.size()};
  std::copy_n(plan.pieces, plan.num_pieces, pieces + 1);
  recovery_->maybe_skip_number();
  const auto& cid = peer_ids_[0].bytes;
  const std::size_t bytes =
      protection_->seal(recovery_->next_number(), number_bytes,
                        {reinterpret_cast<const std::uint8_t*>(cid.data()), cid.size()}, pieces,
                        plan.num_pieces + 1, writer.size() + plan.stream_bytes, out.data());
  plan.packet.bytes = static_cast<std::uint32_t>(bytes);
  plan.packet.stream_bytes = static_cast<std::uint32_t>(plan.stream_bytes);
  if (options_.qlog) trace_packet(plan, has_ack, bytes, now);
  recovery_->on_sent(plan.packet, plan.elicits, now);
  ++counters_.packets_sent;
  if (has_ack) {
    num_unacked_eliciting_ = 0;
    ack_at_ = base::kNever;
  }
  if ((plan.packet.controls & kHello) != 0 && !is_heard_) {
    hello_at_ = now + std::max(kHelloEveryMinNs, 2 * recovery_->smoothed_rtt());
  }
  if (plan.elicits) keep_alive_at_ = now + options_.keep_alive_ns;
  return bytes;
}

void Session::trace_packet(const Plan& plan, bool has_ack, std::size_t bytes, TimeNs now) {
  Qlog& qlog = *options_.qlog;
  if (has_ack) {
    std::vector<Interval> ranges(received_.begin(), received_.end());
    std::reverse(ranges.begin(), ranges.end());
    qlog.add_ack(std::span(ranges).first(std::min(ranges.size(), kAckRangesMax)));
  }
  constexpr std::pair<Control, std::uint64_t> kFrames[] = {{kPing, kFramePing},
                                                           {kMaxData, kFrameMaxData},
                                                           {kMaxStreamData, kFrameMaxStreamData},
                                                           {kPathChallenge, kFramePathChallenge},
                                                           {kPathResponse, kFramePathResponse},
                                                           {kHello, kFrameDatagramLength},
                                                           {kRetireIds, kFrameRetireConnectionId}};
  for (const auto& [control, type] : kFrames) {
    if ((plan.packet.controls & control) != 0) qlog.add_frame(type);
  }
  if (plan.stream_bytes > 0) {
    qlog.add_stream(stream_id_, plan.packet.stream_begin, plan.stream_bytes);
  }
  qlog.end_packet(Qlog::Direction::kSent, recovery_->next_number(), bytes, now);
}

void Session::write_ack(Writer& writer, TimeNs now) {
  const bool has_ecn = ecn_counts_[1] + ecn_counts_[2] + ecn_counts_[3] > 0;
  const std::size_t count = std::min(
      {received_.num_intervals(), kAckRangesMax, 1 + (writer.left() - kAckBytes) / kAckRangeBytes});
  const auto range = [&](std::size_t i) { return received_[received_.num_intervals() - 1 - i]; };
  writer.varint(has_ecn ? kFrameAckEcn : kFrameAck);
  writer.varint(range(0).end - 1);
  const TimeNs delay = std::max<TimeNs>(now - largest_received_at_, 0);
  writer.varint(static_cast<std::uint64_t>(delay / 1'000) >> 3);  // our exponent is the default
  writer.varint(count - 1);
  writer.varint(range(0).size() - 1);
  for (std::size_t i = 1; i < count; ++i) {
    writer.varint(range(i - 1).begin - range(i).end - 1);
    writer.varint(range(i).size() - 1);
  }
  if (!has_ecn) return;
  writer.varint(ecn_counts_[static_cast<int>(Ecn::kEct0)]);
  writer.varint(ecn_counts_[static_cast<int>(Ecn::kEct1)]);
  writer.varint(ecn_counts_[static_cast<int>(Ecn::kMarked)]);
}

void Session::write_controls(Writer& writer, Plan& plan) {
  if (controls_ == 0) return;
  const auto take = [&](Control control) {
    if ((controls_ & control) == 0 || writer.left() < kControlRoom) return false;
    controls_ = static_cast<std::uint16_t>(controls_ & ~control);
    plan.packet.controls |= control;
    plan.elicits = true;
    return true;
  };
  if (take(kPathChallenge)) {
    writer.varint(kFramePathChallenge);
    writer.span(challenge_);
  }
  if (take(kPathResponse)) {
    writer.varint(kFramePathResponse);
    writer.span(response_);
  }
  if (take(kPing)) writer.varint(kFramePing);
  if (take(kMaxData)) {
    writer.varint(kFrameMaxData);
    writer.varint(receive_max_);
  }
  if (take(kMaxStreamData)) {
    writer.varint(kFrameMaxStreamData);
    writer.varint(stream_id_);
    writer.varint(stream_receive_max_);
  }
  if (datagram_bytes_max_ >= kHelloBytes + 3 && take(kHello)) {
    writer.varint(kFrameDatagramLength);
    writer.varint(kHelloBytes);
    writer.span({reinterpret_cast<const std::uint8_t*>(kHelloText), kHelloBytes - 1});
    writer.fixed((peer_is_live_ ? kHelloHearsYou : 0u) | (is_heard_ ? kHelloKnowsIt : 0u), 1);
  }
  if (take(kRetireIds)) {
    constexpr std::uint64_t kBytes = 9;  // of one, at most
    const std::uint64_t end =
        std::min<std::uint64_t>(retired_before_, retire_told_ + writer.left() / kBytes);
    for (; retire_told_ < end; ++retire_told_) {
      writer.varint(kFrameRetireConnectionId);
      writer.varint(retire_told_);
    }
    if (retire_told_ < retired_before_) controls_ |= kRetireIds;
  }
}

// plan.stream_bytes: the room for the frame before, its bytes after.
void Session::plan_stream(Writer& writer, Plan& plan) {
  const std::size_t room = std::exchange(plan.stream_bytes, 0);
  std::uint64_t begin, end;
  if (!next_stream_range(&begin, &end)) return;
  const std::size_t header = 1 + varint_bytes(stream_id_) + varint_bytes(begin) + 2;
  const std::uint64_t bytes = std::min<std::uint64_t>(end - begin, room - header);
  plan.num_pieces = stream_.source().gather(begin, bytes, plan.pieces, kPiecesMax);
  std::uint64_t gathered = 0;
  for (int i = 0; i < plan.num_pieces; ++i) gathered += plan.pieces[i].iov_len;
  PYCOMM_CHECK(gathered > 0 && gathered <= bytes);
  writer.varint(kFrameStream | kStreamOffsetBit | kStreamLengthBit);
  writer.varint(stream_id_);
  writer.varint(begin);
  writer.varint(gathered, 2);
  plan.elicits = true;
  plan.packet.stream_begin = begin;
  plan.stream_bytes = gathered;
  if (stream_.on_sent(begin, begin + gathered)) counters_.stream_bytes_resent += gathered;
}

std::size_t Session::send_mtu_probe(std::span<std::uint8_t> out, TimeNs now) {
  const std::uint64_t size = mtu_.wanted_probe(now);
  if (size == 0 || size > out.size()) return 0;
  std::vector<std::uint8_t> payload(size - overhead(), 0);  // PADDING
  payload[0] = kFramePing;
  const iovec piece{payload.data(), payload.size()};
  const std::size_t number_bytes =
      Protection::packet_number_bytes(recovery_->next_number(), recovery_->num_unacked());
  const auto& cid = peer_ids_[0].bytes;
  SentPacket packet;
  packet.is_mtu_probe = true;
  const std::size_t bytes =
      protection_->seal(recovery_->next_number(), number_bytes,
                        {reinterpret_cast<const std::uint8_t*>(cid.data()), cid.size()}, &piece, 1,
                        payload.size(), out.data());
  packet.bytes = static_cast<std::uint32_t>(bytes);
  if (options_.qlog) {
    options_.qlog->add_frame(kFramePing);
    options_.qlog->add_frame(kFramePadding);
    options_.qlog->end_packet(Qlog::Direction::kSent, recovery_->next_number(), bytes, now);
  }
  recovery_->on_sent(packet, true, now);
  mtu_.on_probe_sent(bytes);
  ++counters_.packets_sent;
  return bytes;
}

std::size_t Session::send_close(std::span<std::uint8_t> out, TimeNs now) {
  std::array<std::uint8_t, kScratchBytes> scratch;
  Writer writer(scratch);
  const bool is_application = close_code_ == 0;
  writer.varint(is_application ? kFrameCloseApplication : kFrameCloseTransport);
  writer.varint(close_code_);
  if (!is_application) writer.varint(0);
  const std::size_t bytes = std::min<std::size_t>(close_reason_.size(), 200);
  writer.varint(bytes);
  writer.span({reinterpret_cast<const std::uint8_t*>(close_reason_.data()), bytes});
  const iovec piece{scratch.data(), writer.size()};
  const auto& cid = peer_ids_[0].bytes;
  const std::size_t total =
      protection_->seal(recovery_->next_number(), kPacketNumberBytesMax,
                        {reinterpret_cast<const std::uint8_t*>(cid.data()), cid.size()}, &piece, 1,
                        writer.size(), out.data());
  if (options_.qlog) {
    options_.qlog->add_frame(kFrameCloseTransport);
    options_.qlog->end_packet(Qlog::Direction::kSent, recovery_->next_number(), total, now);
  }
  return total;
}

}  // namespace pycomm::transport::quic
