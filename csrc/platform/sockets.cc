#include "platform/sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "platform/system.h"

namespace pycomm::platform {
namespace {

// Waits until fd is ready for `events`; kTimeout at the deadline.
Status wait_ready(int fd, short events, base::TimeNs deadline) {
  for (;;) {
    const base::TimeNs left = deadline - real_clock().now_ns();
    if (left <= 0) return Status::error(StatusCode::kTimeout, "socket not ready in time");
    pollfd entry{fd, events, 0};
    const int ms = left > 1'000'000'000 ? 1000 : static_cast<int>(left / 1'000'000) + 1;
    const int n = poll(&entry, 1, ms);
    if (n > 0) return Status();
    if (n < 0 && errno != EINTR) return system_error("poll");
  }
}

sockaddr_un abstract_address(const std::string& name, socklen_t* bytes) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(),
              std::min(name.size(), sizeof address.sun_path - 1));
  *bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

bool parse_ipv4(const std::string& text, in_addr* out) {
  return inet_pton(AF_INET, text.c_str(), out) == 1;
}

constexpr std::size_t kMessageBytesMax = 4096;
constexpr std::size_t kFdsMax = 8;

}  // namespace

Result<UniqueFd> listen_local(const std::string& name) {
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return system_error("socket(AF_UNIX)");
  socklen_t bytes;
  const sockaddr_un address = abstract_address(name, &bytes);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), bytes) != 0) {
    return system_error("bind of a local socket");
  }
  if (listen(fd.get(), 128) != 0) return system_error("listen on a local socket");
  return fd;
}

Result<UniqueFd> connect_local(const std::string& name, base::TimeNs deadline) {
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return system_error("socket(AF_UNIX)");
  socklen_t bytes;
  const sockaddr_un address = abstract_address(name, &bytes);
  // EAGAIN: the listener's queue is full.
  while (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), bytes) != 0) {
    if (errno != EAGAIN && errno != EINTR) return system_error("connect to a peer's local socket");
    if (real_clock().now_ns() > deadline) {
      return Status::error(StatusCode::kTimeout, "the peer's local socket takes no connection");
    }
    sleep_ns(1'000'000);
  }
  return fd;
}

UniqueFd accept_one(int listener) {
  return UniqueFd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

Result<PeerCredentials> peer_credentials(int fd) {
  ucred credentials{};
  socklen_t bytes = sizeof credentials;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) {
    return system_error("SO_PEERCRED");
  }
  return PeerCredentials{credentials.pid, credentials.uid};
}

unsigned effective_uid() { return geteuid(); }

Status send_with_fds(int fd, const std::string& message, const std::vector<int>& fds,
                     base::TimeNs deadline) {
  iovec body{const_cast<char*>(message.data()), message.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kFdsMax)] = {};
  msghdr header{};
  header.msg_iov = &body;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* item = CMSG_FIRSTHDR(&header);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(item), fds.data(), sizeof(int) * fds.size());
  }
  for (;;) {
    const ssize_t n = sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n == static_cast<ssize_t>(message.size())) return Status();
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {
      PYCOMM_RETURN_IF_ERROR(wait_ready(fd, POLLOUT, deadline));
      continue;
    }
    return system_error("sendmsg on a local socket");
  }
}

Result<std::string> receive_with_fds(int fd, std::size_t num_fds, std::vector<UniqueFd>* fds,
                                     base::TimeNs deadline) {
  std::string message(kMessageBytesMax, '\0');
  for (;;) {
    iovec body{message.data(), message.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kFdsMax)] = {};
    msghdr header{};
    header.msg_iov = &body;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    const ssize_t n = recvmsg(fd, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {
      PYCOMM_RETURN_IF_ERROR(wait_ready(fd, POLLIN, deadline));
      continue;
    }
    if (n < 0) return system_error("recvmsg on a local socket");
    if (n == 0) return Status::error(StatusCode::kSystem, "the peer closed its local socket");
    for (cmsghdr* item = CMSG_FIRSTHDR(&header); item; item = CMSG_NXTHDR(&header, item)) {
      if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int received;
        std::memcpy(&received, CMSG_DATA(item) + i * sizeof(int), sizeof received);
        fds->emplace_back(received);
      }
    }
    if ((header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || fds->size() != num_fds) {
      return Status::error(StatusCode::kInternal, "a malformed message on a local socket");
    }
    message.resize(static_cast<std::size_t>(n));
    return message;
  }
}

Status await_readable(int fd, base::TimeNs deadline) { return wait_ready(fd, POLLIN, deadline); }

Result<TcpListener> listen_tcp(const std::string& address, std::uint16_t first_port,
                               std::uint16_t last_port) {
  sockaddr_in local{};
  local.sin_family = AF_INET;
  local.sin_addr.s_addr = htonl(INADDR_ANY);
  if (!address.empty() && !parse_ipv4(address, &local.sin_addr)) {
    return Status::error(StatusCode::kInvalidUsage,
                         "the address to listen on, '" + address + "', is not an IPv4 address");
  }
  // Ranks of one host start at different places, so that they do not all try the same ports.
  const unsigned num_ports = last_port - first_port + 1u;
  const unsigned start = static_cast<unsigned>(random_u64() % num_ports);
  for (unsigned i = 0; i < num_ports; ++i) {
    TcpListener listener;
    listener.fd.reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!listener.fd) return system_error("socket(AF_INET)");
    local.sin_port = htons(static_cast<std::uint16_t>(first_port + (start + i) % num_ports));
    if (bind(listener.fd.get(), reinterpret_cast<sockaddr*>(&local), sizeof local) != 0 ||
        listen(listener.fd.get(), 128) != 0) {
      if (errno == EADDRINUSE || errno == EACCES) continue;
      return system_error("a TCP listener on '" + address + "'");
    }
    socklen_t bytes = sizeof local;
    getsockname(listener.fd.get(), reinterpret_cast<sockaddr*>(&local), &bytes);
    listener.port = ntohs(local.sin_port);
    return listener;
  }
  return Status::error(StatusCode::kSystem,
                       "no port of PYCOMM_PORT_RANGE " + std::to_string(first_port) + "-" +
                           std::to_string(last_port) + " is free on '" + address +
                           "'; widen the range, or stop what holds it (ss -ltnp shows what does)");
}

Result<UniqueFd> connect_tcp(const std::string& address, std::uint16_t port,
                             base::TimeNs deadline) {
  const std::string where = address + ":" + std::to_string(port);
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return system_error("socket(AF_INET)");
  sockaddr_in remote{};
  remote.sin_family = AF_INET;
  remote.sin_port = htons(port);
  if (!parse_ipv4(address, &remote.sin_addr)) {
    return Status::error(StatusCode::kInternal, "a peer advertised '" + address + "'");
  }
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&remote), sizeof remote) != 0 &&
      errno != EINPROGRESS) {
    return system_error("connect to " + where);
  }
  PYCOMM_RETURN_IF_ERROR(wait_ready(fd.get(), POLLOUT, deadline));
  int error = 0;
  socklen_t bytes = sizeof error;
  getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
  if (error != 0) {
    errno = error;
    return system_error("connect to " + where);
  }
  PYCOMM_RETURN_IF_ERROR(configure_stream(fd.get()));
  return fd;
}

Status configure_stream(int fd) {
  const int one = 1;
  if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) != 0) {
    return system_error("TCP_NODELAY");
  }
  // A host that vanishes is noticed within a minute: by probes when idle, by silence when not.
  const int idle_s = 15, interval_s = 5, count = 6, silence_ms = 45'000;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silence_ms, sizeof silence_ms);
  set_nonblocking(fd, true);
  return Status();
}

void set_nonblocking(int fd, bool nonblocking) {
  const int flags = fcntl(fd, F_GETFL);
  fcntl(fd, F_SETFL, nonblocking ? flags | O_NONBLOCK : flags & ~O_NONBLOCK);
}

void end_writing(int fd) { shutdown(fd, SHUT_WR); }

IoResult write_vectors(int fd, const iovec* vectors, int count) {
  msghdr header{};
  header.msg_iov = const_cast<iovec*>(vectors);
  header.msg_iovlen = static_cast<std::size_t>(count);
  const ssize_t n = sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n >= 0) return {IoOutcome::kMoved, static_cast<std::uint64_t>(n), 0};
  if (errno == EAGAIN || errno == EINTR) return {IoOutcome::kWouldBlock, 0, 0};
  return {IoOutcome::kFailed, 0, errno};
}

IoResult read_some(int fd, void* data, std::uint64_t bytes) {
  const ssize_t n = recv(fd, data, bytes, MSG_DONTWAIT);
  if (n > 0) return {IoOutcome::kMoved, static_cast<std::uint64_t>(n), 0};
  if (n == 0) return {IoOutcome::kClosed, 0, 0};
  if (errno == EAGAIN || errno == EINTR) return {IoOutcome::kWouldBlock, 0, 0};
  return {IoOutcome::kFailed, 0, errno};
}

std::string outgoing_address() {
  // A UDP connect sends nothing; it only asks the routing table. 192.0.2.1 is RFC 5737's example.
  UniqueFd fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_in remote{};
  remote.sin_family = AF_INET;
  remote.sin_port = htons(9);
  inet_pton(AF_INET, "192.0.2.1", &remote.sin_addr);
  sockaddr_in local{};
  socklen_t bytes = sizeof local;
  char text[INET_ADDRSTRLEN];
  if (fd && connect(fd.get(), reinterpret_cast<sockaddr*>(&remote), sizeof remote) == 0 &&
      getsockname(fd.get(), reinterpret_cast<sockaddr*>(&local), &bytes) == 0 &&
      inet_ntop(AF_INET, &local.sin_addr, text, sizeof text) != nullptr) {
    return text;
  }
  return "127.0.0.1";
}

bool is_loopback_address(const std::string& address) {
  in_addr parsed;
  return parse_ipv4(address, &parsed) && (ntohl(parsed.s_addr) >> 24) == 127;
}

std::vector<Interface> list_interfaces() {
  std::vector<Interface> interfaces;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return interfaces;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    const bool is_usable = entry->ifa_addr != nullptr && entry->ifa_addr->sa_family == AF_INET &&
                           (entry->ifa_flags & IFF_UP) != 0;
    const bool is_new = interfaces.empty() || interfaces.back().name != entry->ifa_name;
    char text[INET_ADDRSTRLEN];
    const auto* address = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
    if (!is_usable || !is_new ||
        inet_ntop(AF_INET, &address->sin_addr, text, sizeof text) == nullptr) {
      continue;
    }
    interfaces.push_back({entry->ifa_name, text, (entry->ifa_flags & IFF_LOOPBACK) != 0});
  }
  freeifaddrs(list);
  return interfaces;
}

bool is_public_address(const std::string& address) {
  in_addr parsed;
  if (!parse_ipv4(address, &parsed)) return true;
  const std::uint32_t a = ntohl(parsed.s_addr);
  const auto in = [a](std::uint32_t network, int prefix) {
    return (a >> (32 - prefix)) == (network >> (32 - prefix));
  };
  return !(in(0x7f000000, 8) || in(0x0a000000, 8) || in(0xac100000, 12) || in(0xc0a80000, 16) ||
           in(0x64400000, 10) || in(0xa9fe0000, 16) || a == 0);
}

}  // namespace pycomm::platform
