// UDP in batches: many packets a system call, out by GSO and in by GRO, with ECN marks.
#pragma once

#include <netinet/in.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "platform/fd.h"
#include "platform/sockets.h"
#include "pycomm/status.h"

namespace pycomm::platform {

struct UdpPeer {
  std::uint32_t host = 0;  // IPv4, network byte order
  std::uint16_t port = 0;  // network byte order
  bool operator==(const UdpPeer&) const = default;

  static Result<UdpPeer> parse(const std::string& host, std::uint16_t port);
  std::string host_text() const;
  std::uint16_t port_number() const;
};

// One thing that arrived: one or more datagrams of `segment` bytes, the last maybe shorter.
struct UdpArrival {
  std::span<std::uint8_t> bytes;
  std::size_t segment = 0;
  UdpPeer from;
  std::uint8_t ecn = 0;
};

class UdpSocket {
 public:
  // Listens on `address` ("" = any) and a free port in [first, last] unless both are 0.
  static Result<UdpSocket> open(const std::string& address, std::uint16_t first_port,
                                std::uint16_t last_port);

  int fd() const { return fd_.get(); }
  std::uint16_t port() const { return port_; }

  // Sends datagrams of `segment` bytes each, the last maybe shorter. kWouldBlock: none of them, or
  // result.bytes says how many bytes of them.
  IoResult send(const UdpPeer& to, std::span<const std::uint8_t> bytes, std::size_t segment);
  // What is there, into memory of the socket's that the next call uses again.
  std::span<UdpArrival> receive();
  // Peers at whose ports nobody listens, as the system heard since the last call.
  std::vector<UdpPeer> take_unreachable();
  bool has_gso() const { return has_gso_; }
  bool has_gro() const { return has_gro_; }

 private:
  UniqueFd fd_;
  std::uint16_t port_ = 0;
  bool has_gso_ = false, has_gro_ = false;
  std::vector<std::uint8_t> buffer_;
  std::vector<UdpArrival> arrivals_;
};

}  // namespace pycomm::platform
