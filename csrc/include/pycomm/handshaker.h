// QUIC's handshake, done outside the core (pycomm/control, by aioquic) and handed over once: the
// core moves datagrams for it until a connection is confirmed and quiet, and speaks 1-RTT packets
// itself from then on.
//
// Thread: the one that creates a group; calls never overlap.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pycomm/options.h"
#include "pycomm/types.h"

namespace pycomm {

// A UDP address, IPv4 or IPv6, as text and number.
struct UdpAddress {
  std::string host;
  std::uint16_t port = 0;
};

struct ConnectionId {
  std::uint64_t sequence = 0;
  std::string bytes;
  std::string reset_token;  // 16 bytes, or empty if none was said
};

// A confirmed QUIC v2 connection, as another implementation can carry it on (RFC 9000, 9001, 9369).
struct HandedOver {
  bool is_client = false;
  bool is_chacha20 = false;                      // else AES-128-GCM
  std::string sending_secret, receiving_secret;  // 32 bytes each
  std::vector<ConnectionId> own_ids;             // the peer may send to any of them
  std::vector<ConnectionId> peer_ids;            // the first is in use
  std::uint64_t next_packet_number = 0;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> received;  // packet numbers, half open
  // What each side may send: on the connection, and on the first stream that the core uses.
  std::uint64_t stream_id = 0;
  std::uint64_t receive_max = 0, received_bytes = 0, stream_receive_max = 0;
  std::uint64_t send_max = 0, sent_bytes = 0, stream_send_max = 0;
  std::uint64_t datagram_bytes_max = 0;  // of the peer; 0: it takes none
  std::uint64_t udp_payload_max = 0;     // of the peer
  std::uint64_t idle_timeout_ms = 0;     // the lower one of both; 0: none
  std::uint64_t ack_delay_exponent = 3;  // of the peer's
  std::uint64_t ack_delay_max_ms = 25;   // of the peer's
  std::uint64_t rtt_us = 0;
  UdpAddress peer;
  std::string peer_process_id;  // proven by its certificate and its word on this connection
  int path = -1;                // of the HandshakeTarget; -1 where the peer connected
};

// What a connection attempt is for.
struct HandshakeTarget {
  UdpAddress address;
  std::string process_id;
  std::string name;  // that its certificate must carry
  int path = 0;      // which of the connections to that process
};

class Handshaker {
 public:
  virtual ~Handshaker() = default;

  struct Datagram {
    std::string bytes;
    UdpAddress address;
  };
  struct Failure {
    std::string process_id;  // empty: of a stranger
    std::string reason;
    int path = -1;  // of the HandshakeTarget; -1 where the peer connected
  };

  virtual void connect(const HandshakeTarget& target) = 0;
  virtual void receive(const std::string& datagram, const UdpAddress& from) = 0;
  // Moves timers on, and takes what has to be sent.
  virtual std::vector<Datagram> take_datagrams() = 0;
  // Whether anything came back from the process that connect() is after.
  virtual bool has_heard(const std::string& process_id, int path) = 0;
  virtual std::vector<HandedOver> take_established() = 0;
  virtual std::vector<Failure> take_failures() = 0;
};

// Of the process that accepts: who may connect, by process id, and the certificate's name.
struct HandshakerOptions {
  TlsOptions tls;
  std::string secret;      // of the job; may be empty
  std::string process_id;  // of this process
  std::string reset_key;   // 32 bytes; stateless reset tokens are derived from it
  std::vector<std::pair<std::string, std::string>> expected;  // process id, name
  std::string keylog_file;  // of mode 0600; empty: no keys are written
};

using HandshakerFactory = std::unique_ptr<Handshaker> (*)(const HandshakerOptions&);

// Set once, by the language binding; null without one: then there is no QUIC.
void set_handshaker_factory(HandshakerFactory factory);
HandshakerFactory handshaker_factory();

}  // namespace pycomm
