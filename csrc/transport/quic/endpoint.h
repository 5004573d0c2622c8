// The one UDP socket of a process: datagrams to the session whose connection ID they carry; what is
// of no session here is for whoever shakes hands, or answered by a stateless reset.
// Thread: the engine's, under its lock.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "platform/udp.h"
#include "pycomm/handshaker.h"
#include "transport/quic/session.h"

namespace pycomm::transport::quic {

inline constexpr std::size_t kOwnIdBytes = 8;  // of all connection IDs that this process gives out

class Endpoint {
 public:
  static constexpr std::size_t kUnclaimedMax = 256;
  static constexpr int kResetsPerSecond = 100;

  // `reset_key`: 32 bytes from which tokens are derived; the same for all lives of a process, so
  // that a peer of the last one is told.
  static Result<std::unique_ptr<Endpoint>> open(const std::string& address,
                                                std::uint16_t first_port, std::uint16_t last_port,
                                                std::string reset_key);

  int fd() const { return socket_.fd(); }
  std::uint16_t port() const { return socket_.port(); }
  const std::string& reset_key() const { return reset_key_; }

  void add(Session& session);
  void remove(Session& session);

  // Takes in what is there; true if anything was.
  bool progress(base::TimeNs now);
  // Sends what the session may send now. False: the socket is full, come again.
  bool flush(Session& session, base::TimeNs now);

  // --- for handshakes
  struct Unclaimed {
    std::string bytes;
    UdpAddress from;
  };
  // While someone shakes hands nothing is reset.
  void set_shaking_hands(bool is_shaking) { num_shaking_ += is_shaking ? 1 : -1; }
  std::deque<Unclaimed> take_unclaimed() { return std::exchange(unclaimed_, {}); }
  void send(const std::string& datagram, const UdpAddress& to);

 private:
  explicit Endpoint(platform::UdpSocket socket) : socket_(std::move(socket)) {}
  void dispatch(std::span<std::uint8_t> datagram, const platform::UdpPeer& from, std::uint8_t ecn,
                base::TimeNs now);
  void on_unknown(std::span<std::uint8_t> datagram, const platform::UdpPeer& from,
                  base::TimeNs now);
  const UdpAddress& address_of(const platform::UdpPeer& peer);

  struct Waiting {
    platform::UdpPeer to;
    std::vector<std::uint8_t> bytes;
    std::size_t segment = 0;
  };

  platform::UdpSocket socket_;
  std::string reset_key_;
  std::unordered_map<std::uint64_t, Session*> by_id_;
  std::unordered_map<Session*, Waiting> waiting_;  // built, and not taken by the socket
  std::vector<std::uint8_t> batch_;
  std::deque<Unclaimed> unclaimed_;
  platform::UdpPeer last_peer_;
  UdpAddress last_address_;
  int num_shaking_ = 0;
  int num_resets_ = 0;
  base::TimeNs resets_since_ = 0;
  base::TimeNs look_for_errors_at_ = 0;
};

}  // namespace pycomm::transport::quic
