// Sockets: local ones that carry descriptors and credentials, and TCP.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "platform/fd.h"
#include "pycomm/status.h"

namespace pycomm::platform {

// A bidirectional local stream socket in the abstract namespace: no file, gone with its owner.
Result<UniqueFd> listen_local(const std::string& name);
Result<UniqueFd> connect_local(const std::string& name, base::TimeNs deadline);
// Accepts one connection of a non-blocking listener; an empty fd if there is none.
UniqueFd accept_one(int listener);

struct PeerCredentials {
  int pid = 0;  // as seen from this process; 0 if it is in another pid namespace
  unsigned uid = 0;
};
Result<PeerCredentials> peer_credentials(int fd);
unsigned effective_uid();

// One whole message with descriptors, by `deadline`. Errors: kTimeout, kSystem, kInternal (the
// peer sent more, or fewer descriptors than it must).
Status send_with_fds(int fd, const std::string& message, const std::vector<int>& fds,
                     base::TimeNs deadline);
Result<std::string> receive_with_fds(int fd, std::size_t num_fds, std::vector<UniqueFd>* fds,
                                     base::TimeNs deadline);

// Until there is something to read, or an end. Errors: kTimeout.
Status await_readable(int fd, base::TimeNs deadline);

struct TcpListener {
  UniqueFd fd;
  std::uint16_t port = 0;
};
// Listens on `address` ("" = any, v4) and a free port, in [first, last] unless both are 0.
// Errors: kSystem (no such address, no free port), kInvalidUsage (not an address).
Result<TcpListener> listen_tcp(const std::string& address, std::uint16_t first_port,
                               std::uint16_t last_port);
// Errors: kSystem (refused, no route), kTimeout.
Result<UniqueFd> connect_tcp(const std::string& address, std::uint16_t port, base::TimeNs deadline);
// No delay, non-blocking.
Status configure_stream(int fd);
void set_nonblocking(int fd, bool nonblocking);

// Nothing more will be written: the peer reads to the end of file.
void end_writing(int fd);

enum class IoOutcome { kMoved, kWouldBlock, kClosed, kFailed };
struct IoResult {
  IoOutcome outcome;
  std::uint64_t bytes = 0;
  int error = 0;  // errno of kFailed
};
IoResult write_vectors(int fd, const iovec* vectors, int count);
IoResult read_some(int fd, void* data, std::uint64_t bytes);

// The address that this host uses to reach others, by the routing table; "127.0.0.1" without one.
std::string outgoing_address();
bool is_loopback_address(const std::string& address);

// One that is up and has an IPv4 address; the first address of each.
struct Interface {
  std::string name;
  std::string address;
  bool is_loopback = false;
};
std::vector<Interface> list_interfaces();

// Whether an IPv4 address is reachable from the open internet (not RFC 1918, 6598, 3927, loopback).
bool is_public_address(const std::string& address);

}  // namespace pycomm::platform
