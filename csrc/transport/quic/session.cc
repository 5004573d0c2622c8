// The session's life: taking over, timers, acknowledgement and loss, the end.
#include "transport/quic/session.h"

#include <algorithm>
#include <cstring>

#include "platform/secret_memory.h"
#include "transport/quic/frames.h"

namespace pycomm::transport::quic {
namespace {

using base::TimeNs;

constexpr TimeNs kUnreachableNs = 300'000'000;
constexpr int kDoubtfulTimeouts = 2;  // in a row

bool take_secret(const std::string& text, TrafficSecret* out) {
  if (text.size() != out->bytes.size()) return false;
  std::memcpy(out->bytes.data(), text.data(), text.size());
  return true;
}

}  // namespace

Result<std::unique_ptr<Session>> Session::create(const HandedOver& state,
                                                 const SessionOptions& options, Stream& stream,
                                                 TimeNs now) {
  std::unique_ptr<Session> s(new Session(options, stream));
  platform::Secret<TrafficSecret> sending, receiving;
  const bool is_whole = take_secret(state.sending_secret, &*sending) &&
                        take_secret(state.receiving_secret, &*receiving) &&
                        !state.own_ids.empty() && !state.peer_ids.empty();
  if (!is_whole) {
    return Status::error(StatusCode::kInvalidUsage, "a QUIC connection without keys or IDs");
  }
  if (!options.peer_is_stock && state.datagram_bytes_max < kHelloBytes + 3) {
    return Status::error(StatusCode::kInvalidUsage, "the peer takes no QUIC datagrams");
  }
  for (const ConnectionId& id : state.own_ids) {
    if (id.bytes.size() != state.own_ids[0].bytes.size() ||
        id.bytes.size() > kConnectionIdBytesMax) {
      return Status::error(StatusCode::kInvalidUsage, "connection IDs of several lengths");
    }
  }
  auto protection =
      Protection::create(state.is_chacha20 ? Cipher::kChaCha20Poly1305 : Cipher::kAes128Gcm,
                         *sending, *receiving, options.limits, options.library);
  if (!protection.is_ok()) return protection.status();
  s->protection_ = std::move(protection).value();
  s->is_client_ = state.is_client;
  s->peer_ = s->validated_peer_ = state.peer;
  s->own_ids_ = state.own_ids;
  s->peer_ids_ = state.peer_ids;
  s->retired_before_ = s->retire_told_ = state.peer_ids[0].sequence;
  s->recovery_ = std::make_unique<Recovery>(
      *s, options.congestion, PathMtu::kBase, options.seed, state.next_packet_number,
      std::max<TimeNs>(static_cast<TimeNs>(state.rtt_us) * 1'000, 1'000),
      static_cast<TimeNs>(state.ack_delay_max_ms) * 1'000'000);
  for (const auto& [begin, end] : state.received) s->received_.add(begin, end);
  if (!s->received_.empty()) s->largest_received_ = s->received_.back().end - 1;
  s->stream_id_ = state.stream_id;
  s->receive_max_ = state.receive_max;
  s->other_received_ = state.received_bytes;
  s->stream_receive_max_ = state.stream_receive_max;
  s->send_max_ = state.send_max;
  s->other_sent_ = state.sent_bytes;
  s->stream_send_max_ = state.stream_send_max;
  s->datagram_bytes_max_ = state.datagram_bytes_max;
  s->ack_delay_exponent_ = state.ack_delay_exponent;
  const std::uint64_t peer_max = state.udp_payload_max == 0 ? UINT64_MAX : state.udp_payload_max;
  s->mtu_.begin(std::min(options.mtu_max, peer_max), now);
  s->now_ = now;
  s->keep_alive_at_ = now + options.keep_alive_ns;
  s->peer_is_live_ = s->is_heard_ = options.peer_is_stock;
  if (!options.peer_is_stock) s->controls_ |= kHello;
  stream.add_path(*s, state.stream_receive_max);
  s->grant();
  return s;
}

void Session::fail(StatusCode code, const std::string& reason) {
  if (!failure_.is_ok()) return;
  failure_ = Status::error(code, reason);
  if (code == StatusCode::kInternal) {  // tell it what it did wrong
    owes_close_ = true;
    close_code_ = 0x0a;  // PROTOCOL_VIOLATION
    close_reason_ = reason;
  }
}

void Session::close(const std::string& reason) {
  if (is_closed_) return;
  is_closed_ = true;
  if (options_.qlog) options_.qlog->closed("we: " + reason, now_);
  owes_close_ = failure_.is_ok();
  close_reason_ = reason;
}

void Session::request_key_update() {
  if (protection_->may_update()) protection_->update();
}

void Session::on_unreachable(TimeNs now) {
  // Anyone on the path can forge that word: it only shortens the wait for a real sign of life.
  if (unreachable_since_ != base::kNever) return;
  unreachable_since_ = now;
  controls_ |= kPing;
}

bool Session::is_reset_token(std::span<const std::uint8_t> token) const {
  bool found = false;
  for (const ConnectionId& id : peer_ids_) {
    if (id.reset_token.size() != token.size()) continue;
    std::uint8_t difference = 0;
    for (std::size_t i = 0; i < token.size(); ++i) {
      difference |= static_cast<std::uint8_t>(id.reset_token[i]) ^ token[i];
    }
    found |= difference == 0;
  }
  return found;
}

SessionCounters Session::counters() const {
  counters_.packets_lost = recovery_->num_lost() - recovery_->num_spurious();
  counters_.num_forged = protection_->num_forged();
  counters_.num_key_updates = protection_->num_updates();
  return counters_;
}

void Session::trace(TimeNs now) {
  if (!options_.qlog) return;
  const CongestionControl& congestion = recovery_->congestion();
  options_.qlog->metrics(
      {recovery_->smoothed_rtt(), recovery_->latest_rtt(), recovery_->min_rtt(),
       congestion.window_bytes(), recovery_->in_flight(), congestion.pacing_bytes_per_s()},
      now);
  options_.qlog->mtu(mtu_.current(), now);
  options_.qlog->num_key_updates(protection_->num_updates(), now);
  if (!failure_.is_ok()) options_.qlog->closed(failure_.message(), now);
}

// ---------------------------------------------------------------- timers

TimeNs Session::next_deadline() const {
  if (owes_close_) return 0;
  if (is_closed_ || !failure_.is_ok()) return base::kNever;
  TimeNs at = std::min({recovery_->next_timer(), keep_alive_at_, hello_at_, path_deadline_});
  if (!is_path_exhausted()) at = std::min(at, ack_at_);  // else it waits for what comes
  if (silent_since_ != base::kNever) at = std::min(at, silent_since_ + options_.peer_timeout_ns);
  if (unreachable_since_ != base::kNever) at = std::min(at, unreachable_since_ + kUnreachableNs);
  if ((controls_ & (kPathChallenge | kPathResponse)) != 0 && !is_path_exhausted()) return 0;
  if (is_window_open() && !is_path_exhausted() && has_something_to_send())
    at = std::min(at, send_at_);
  return at;
}

void Session::on_timer(TimeNs now) {
  now_ = now;
  if (is_closed_ || !failure_.is_ok()) return;
  if (now >= recovery_->next_timer()) {
    const bool was_full_sized = recovery_->has_outstanding() && mtu_.current() > PathMtu::kBase;
    recovery_->on_timer(now);
    if (recovery_->wants_probe()) {
      if (silent_since_ == base::kNever) silent_since_ = recovery_->oldest_sent_at();
      if (!is_useful() && stream_.has_other_path(*this)) hand_back();
      if (mtu_.on_timeouts(recovery_->num_timeouts(), was_full_sized, now)) {
        recovery_->congestion().set_mtu(mtu_.current());
      }
    }
  }
  if (now >= keep_alive_at_) {
    controls_ |= kPing;
    keep_alive_at_ = now + options_.keep_alive_ns;
  }
  if (now >= hello_at_) {
    controls_ |= kHello;
    hello_at_ = base::kNever;
  }
  if (now >= path_deadline_) {  // the new address did not answer: back to the one that did
    peer_ = validated_peer_;
    is_validated_ = true;
    path_deadline_ = base::kNever;
  }
  const auto is_over = [&](TimeNs since, TimeNs wait) {
    return since != base::kNever && now >= since + wait;
  };
  if (is_over(unreachable_since_, kUnreachableNs)) {
    fail(StatusCode::kPeerLost, "nobody listens at its address any more: its process ended");
  } else if (is_over(silent_since_, options_.peer_timeout_ns)) {
    fail(StatusCode::kPeerLost, "it has not answered for " +
                                    std::to_string(options_.peer_timeout_ns / 1'000'000'000) +
                                    " s");
  }
}

// ---------------------------------------------------------------- what became of packets

void Session::on_packet_acked(std::uint64_t number, const SentPacket& packet) {
  protection_->on_acked(number);
  if (packet.is_mtu_probe) {
    mtu_.on_probe_acked(packet.bytes, now_);
    recovery_->congestion().set_mtu(mtu_.current());
  }
  if (packet.stream_bytes == 0) return;
  const std::uint64_t end = packet.stream_begin + packet.stream_bytes;
  stream_.on_acked(packet.stream_begin, end);
}

void Session::on_packet_lost(std::uint64_t number, const SentPacket& packet) {
  if (options_.qlog) options_.qlog->packet_lost(number, now_);
  if (packet.is_mtu_probe) {
    mtu_.on_probe_lost(packet.bytes, now_);
    return;
  }
  controls_ |= packet.controls & static_cast<std::uint16_t>(~(kPing | kHello | kPathResponse));
  if ((packet.controls & kRetireIds) != 0) retire_told_ = 0;
  if (packet.stream_bytes > 0) {
    stream_.on_lost(packet.stream_begin, packet.stream_begin + packet.stream_bytes);
  }
}

bool Session::is_useful() const {
  return peer_is_live_ && failure_.is_ok() && !is_closed_ &&
         recovery_->num_timeouts() < kDoubtfulTimeouts;
}

void Session::hand_back() {
  recovery_->for_each_outstanding([&](const SentPacket& packet) {
    if (packet.stream_bytes > 0) {
      stream_.on_lost(packet.stream_begin, packet.stream_begin + packet.stream_bytes);
    }
  });
}

}  // namespace pycomm::transport::quic
