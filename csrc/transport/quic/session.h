// One QUIC v2 connection after its handshake: datagrams and time in, datagrams and deadlines out.
// No I/O, no clock. Carries one bidirectional stream of bytes, alone or with other sessions
// (stream.h); what a stock peer sends besides is counted, acknowledged and left.
//
// Source: RFC 9000 (frames, flow control, paths, close), RFC 9001 (keys), RFC 9002 (recovery), RFC
// 9221 (DATAGRAM), RFC 9369 (version 2), RFC 8899 (path MTU). Thread: the owner's.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/rng.h"
#include "pycomm/handshaker.h"
#include "pycomm/status.h"
#include "transport/quic/interval_set.h"
#include "transport/quic/path_mtu.h"
#include "transport/quic/protection.h"
#include "transport/quic/qlog.h"
#include "transport/quic/recovery.h"
#include "transport/quic/stream.h"
#include "transport/quic/wire.h"

namespace pycomm::transport::quic {

struct SessionOptions {
  CongestionKind congestion = CongestionKind::kBbr;
  CryptoLibrary library = CryptoLibrary::kAny;
  ProtectionLimits limits;
  std::uint64_t receive_window_max = std::uint64_t{256} << 20;
  std::uint64_t mtu_max = 1472;                   // largest UDP payload to try
  base::TimeNs peer_timeout_ns = 15'000'000'000;  // without a sign of life while one is due
  base::TimeNs keep_alive_ns = 5'000'000'000;
  bool peer_is_stock = false;  // it does not say hello
  std::shared_ptr<Qlog> qlog;  // null: no trace
  std::uint64_t seed = 1;
};

struct SessionCounters {
  std::uint64_t packets_sent = 0, packets_received = 0, packets_lost = 0, packets_duplicate = 0;
  std::uint64_t bytes_sent = 0, bytes_received = 0;  // of UDP payload
  std::uint64_t stream_bytes_resent = 0;
  std::uint64_t num_forged = 0, num_key_updates = 0, num_migrations = 0;
};

inline constexpr std::uint64_t kSmallPacketBytes =
    96;  // has room for a challenge and some of an ACK

enum class Ecn : std::uint8_t { kNone = 0, kEct1 = 1, kEct0 = 2, kMarked = 3 };

class Session final : public RecoveryListener, public StreamPath {
 public:
  // Errors: kSystem (no crypto library), kInvalidUsage (the state is not whole).
  static Result<std::unique_ptr<Session>> create(const HandedOver& state,
                                                 const SessionOptions& options, Stream& stream,
                                                 base::TimeNs now);
  ~Session() override { stream_.remove_path(*this); }

  // Takes one datagram, which is opened in place. False: not a packet of this connection.
  bool receive(std::span<std::uint8_t> datagram, const UdpAddress& from, Ecn ecn, base::TimeNs now);
  // Writes packets of equal size (the last may be shorter) to `out` and returns their bytes, or 0
  // if there is nothing to send or it is not yet time.
  std::size_t send(std::span<std::uint8_t> out, std::size_t* packet_bytes, base::TimeNs now);
  // When on_timer(), then send(), want to be called.
  base::TimeNs next_deadline() const;
  void on_timer(base::TimeNs now);

  // Says goodbye on the connection; afterwards nothing is received.
  void close(const std::string& reason);
  bool is_closed() const { return is_closed_; }
  // Ok, or why the connection is over: kPeerLost with the reason, kInternal (protocol violation).
  const Status& failure() const { return failure_; }
  // The peer's engine has spoken, so that stream bytes reach it and not its handshake.
  bool is_live() const { return peer_is_live_; }
  // The system says that nobody listens at the peer's address any more.
  void on_unreachable(base::TimeNs now);
  void request_key_update();

  const UdpAddress& peer() const { return peer_; }
  const std::vector<ConnectionId>& own_ids() const { return own_ids_; }
  // The last 16 bytes of a datagram that receive() did not know (RFC 9000 section 10.3.1).
  bool is_reset_token(std::span<const std::uint8_t> token) const;
  void on_reset() { fail(StatusCode::kPeerLost, "its process was restarted (stateless reset)"); }

  const Recovery& recovery() const { return *recovery_; }
  SessionCounters counters() const;
  std::uint64_t packets_sent() const { return counters_.packets_sent; }
  std::uint64_t mtu() const { return mtu_.current(); }
  const char* crypto_library() const { return protection_->library(); }

  // --- StreamPath
  bool is_useful() const override;
  base::TimeNs round_trip() const override { return recovery_->smoothed_rtt(); }
  double bytes_per_s() const override { return recovery_->congestion().bandwidth_bytes_per_s(); }
  // Leaves what is under way here to the other paths of the stream.
  void hand_back();
  void ping() { controls_ |= kPing; }

 private:
  Session(const SessionOptions& options, Stream& stream)
      : options_(options), stream_(stream), rng_(options.seed) {}

  void trace(base::TimeNs now);
  void fail(StatusCode code, const std::string& reason);
  void violate(const std::string& what) { fail(StatusCode::kInternal, "QUIC: " + what); }

  // --- receiving (session_receive.cc)
  void parse(std::span<const std::uint8_t> payload, std::uint64_t number, base::TimeNs now);
  bool parse_frame(Reader& reader, std::uint64_t type, base::TimeNs now);
  void on_ack_frame(Reader& reader, bool has_ecn, base::TimeNs now);
  void on_stream(Reader& reader, std::uint64_t type, base::TimeNs now);
  void on_datagram(std::span<const std::uint8_t> bytes);
  void on_new_connection_id(Reader& reader);
  void on_close(Reader& reader, bool is_application);
  void on_other_address(const UdpAddress& from, std::size_t bytes, base::TimeNs now);
  void grant();
  void note_received(std::uint64_t number, bool elicits, Ecn ecn, std::size_t bytes,
                     base::TimeNs now);

  // --- sending (session_send.cc)
  struct Plan;
  std::size_t send_packet(std::span<std::uint8_t> out, std::size_t size, bool only_acks,
                          bool is_probe, base::TimeNs now);
  void write_ack(Writer& writer, base::TimeNs now);
  void trace_packet(const Plan& plan, bool has_ack, std::size_t bytes, base::TimeNs now);
  void write_controls(Writer& writer, Plan& plan);
  void plan_stream(Writer& writer, Plan& plan);
  bool next_stream_range(std::uint64_t* begin, std::uint64_t* end) const;
  std::size_t send_close(std::span<std::uint8_t> out, base::TimeNs now);
  std::size_t send_mtu_probe(std::span<std::uint8_t> out, base::TimeNs now);
  bool has_something_to_send() const;  // acknowledgements aside
  bool is_window_open() const;
  std::uint64_t path_budget() const;
  bool is_path_exhausted() const { return path_budget() < kSmallPacketBytes; }
  std::size_t burst_bytes() const;
  std::size_t overhead() const;

  void on_packet_acked(std::uint64_t number, const SentPacket& packet) override;
  void on_packet_lost(std::uint64_t number, const SentPacket& packet) override;

  const SessionOptions options_;
  Stream& stream_;
  base::Rng rng_;
  base::TimeNs now_ = 0;  // of the call in hand
  std::unique_ptr<Protection> protection_;
  std::unique_ptr<Recovery> recovery_;
  PathMtu mtu_;
  bool is_client_ = false;
  UdpAddress peer_;
  std::vector<ConnectionId> own_ids_, peer_ids_;
  std::uint64_t retired_before_ = 0;  // peer ids below it were given back
  std::uint64_t retire_told_ = 0;

  // --- what came
  IntervalSet received_;
  std::uint64_t received_floor_ = 0;  // below it everything counts as received
  std::uint64_t largest_received_ = 0;
  base::TimeNs largest_received_at_ = 0;
  int num_unacked_eliciting_ = 0;
  base::TimeNs ack_at_ = base::kNever;
  std::uint64_t ecn_counts_[4] = {};
  bool elicits_ = false;          // the packet in hand asks for an acknowledgement
  bool is_probing_only_ = false;  // it has nothing but path probes

  // --- the stream, and flow control
  std::uint64_t stream_id_ = 0;
  std::uint64_t other_received_ = 0;  // bytes on the connection that were not this stream's
  std::uint64_t receive_max_ = 0, stream_receive_max_ = 0;
  std::uint64_t send_max_ = 0, stream_send_max_ = 0, other_sent_ = 0;

  std::uint16_t controls_ = 0;  // wanted
  bool peer_is_live_ = false, is_heard_ = false;
  base::TimeNs hello_at_ = base::kNever;
  std::uint64_t datagram_bytes_max_ = 0;
  std::uint64_t ack_delay_exponent_ = 3;

  // --- the path
  std::array<std::uint8_t, 8> challenge_{}, response_{};
  bool is_validated_ = true;
  UdpAddress validated_peer_;
  std::uint64_t path_received_ = 0, path_sent_ = 0;  // since the address changed
  base::TimeNs path_deadline_ = base::kNever;

  // --- timers
  base::TimeNs send_at_ = 0;  // pacing
  base::TimeNs keep_alive_at_ = base::kNever;
  base::TimeNs silent_since_ = base::kNever;  // a sign of life is due since then
  base::TimeNs unreachable_since_ = base::kNever;
  bool has_pacing_room_ = true;

  bool is_closed_ = false, owes_close_ = false;
  std::uint64_t close_code_ = 0;
  std::string close_reason_;
  Status failure_;
  mutable SessionCounters counters_;
};

}  // namespace pycomm::transport::quic
